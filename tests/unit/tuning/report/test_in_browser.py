"""The page in a real browser: figures are drawn, nothing overflows, on a laptop and on a phone."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from ray_lowcomm.tuning.report import write_report

from ..fake_trials import sweep

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or any that is on the PATH"
)
WIDTHS = {"laptop": 1280, "phone": 390}
HEIGHT = 6000
BAD = '<!DOCTYPE html><body><p style="width:2000px">wide</p><div style="width:100px">' + "x" * 90 + "</div></body>"
DEADLINE_S = 240
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
# Each width is a frame of its own in one page, since a headless window is never narrower than 500. The report in the
# frame is the file as it is; what is measured is measured from outside.
MEASURE = """
const measured = {};
const done = [];
for (const frame of document.querySelectorAll("iframe")) {
  done.push(new Promise((resolve) => { frame.onload = resolve; frame.srcdoc = pages[frame.dataset.page]; }));
}
Promise.all(done).then(() => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement, wide = [];
    const at = frame.getBoundingClientRect();
    for (const one of page.querySelectorAll("body *")) {
      const scrolls = ["auto", "scroll"].includes(frame.contentWindow.getComputedStyle(one).overflowX);
      const box = one.getBoundingClientRect();
      const inside = one.parentElement.closest(".scroll, pre.command");
      if ((!scrolls && one.clientWidth && one.scrollWidth > one.clientWidth + 1)
          || (!inside && (box.right > root.clientWidth + 1 || box.left < -1))) {
        wide.push(one.outerHTML.slice(0, 200));
      }
    }
    measured[frame.id] = {
      width: root.clientWidth, scrollWidth: root.scrollWidth, height: page.body.getBoundingClientRect().height, wide,
      images: [...page.images].map((image) => {
        const box = image.getBoundingClientRect();
        return { natural: image.naturalWidth, alt: image.alt,
                 box: [at.left + box.left, at.top + box.top, at.left + box.right, at.top + box.bottom] };
      }),
    };
  }
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify(measured);
  document.body.append(out);
});
"""


def in_browser(page, folder):
    """What was measured of the page at each width, and of BAD; and the screenshot of all side by side."""
    frames = "".join(
        f'<iframe id="{name}" data-page="{name == "bad":d}" width="{width}" height="{HEIGHT}"></iframe>'
        for name, width in {**WIDTHS, "bad": 300}.items()
    )
    as_script = json.dumps([page, BAD]).replace("</", "<\\/").replace("<!--", "<\\!--")
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        '<!DOCTYPE html><meta charset="utf-8">'
        "<style>body { margin: 0; white-space: nowrap } iframe { border: 0 }</style>"
        f"<body>{frames}<script>const pages = {as_script};{MEASURE}</script>",
        encoding="utf-8",
    )
    picture = folder / "screenshot.png"
    window = f"--window-size={sum(WIDTHS.values()) + 320},{HEIGHT}"
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", window, "--dump-dom"]
    done = subprocess.run(
        [*command, f"--screenshot={picture}", wrapper.as_uri()], capture_output=True, text=True, timeout=DEADLINE_S
    )
    shutil.rmtree(folder / "profile", ignore_errors=True)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, f"the page was not measured: {done.stderr[-2000:]}"
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB"))
    return json.loads(html.unescape(found[1])), pixels


def awkward():
    """A sweep with all that is long: names, values, a reason, fifteen settings, a title."""
    trials = []
    for trial in sweep(20):
        extra = {f"model.args.an_argument_with_a_long_name_{i}": trial.number * (i + 1) % 7 for i in range(8)}
        extra["data.path"] = "s3://" + "a-bucket-whose-name-has-no-end/" * 4 + str(trial.number % 3)
        trials.append(replace(trial, params={**trial.params, **extra}))
    reason = "RuntimeError: " + "x" * 300 + "\n" + "at line 3 of a file somewhere\n" * 5
    trials[-1] = replace(trials[-1], reason=reason)
    return trials, "sweep_" + "of_an_evening_that_would_not_end_" * 4


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    trials, title = awkward()
    paths = write_report(trials, folder / "report", title, "val_loss")
    measured, pixels = in_browser(paths[-1].read_text(encoding="utf-8"), folder)
    return len(paths) - 1, measured, pixels


@pytest.mark.parametrize("screen", WIDTHS)
def test_nothing_overflows(seen, screen):
    _, measured, _ = seen
    page = measured[screen]
    assert page["width"] == WIDTHS[screen]
    assert page["scrollWidth"] <= page["width"]
    assert page["wide"] == []
    assert 1000 < page["height"] < HEIGHT


@pytest.mark.parametrize("screen", WIDTHS)
def test_figures_are_drawn(seen, screen):
    count, measured, pixels = seen
    images = measured[screen]["images"]
    assert len(images) == count == 4
    for image in images:
        assert image["natural"] > 500
        left, top, right, bottom = map(round, image["box"])
        assert right - left > 0.85 * min(WIDTHS[screen], 500)
        shown = pixels[top + 8 : bottom - 8, left + 8 : right - 8].astype(int)
        assert shown.shape[0] > 100
        dark = (shown.sum(-1) < 600).mean()
        assert 0.005 < dark < 0.6, f"{image['alt'][:60]}: {dark:.1%} of it is dark"
        thirds = [part for rows in np.array_split(shown, 3) for part in np.array_split(rows, 3, axis=1)]
        assert sum(part.std() > 1 for part in thirds) >= 7, f"{image['alt'][:60]} is blank in most places"


def test_a_page_that_overflows_would_be_noticed(seen):
    _, measured, _ = seen
    assert measured["bad"]["scrollWidth"] > 300
    assert len(measured["bad"]["wide"]) == 2
