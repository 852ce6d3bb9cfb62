"""The report as files: what is written, what the page says, and that nothing of a user's gets into its HTML."""

import base64
import math
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image

from ray_lowcomm.tuning.metrics import best, ranked
from ray_lowcomm.tuning.report import FIGURES, write_report
from ray_lowcomm.tuning.trials import Point, Trial

from ..fake_trials import sweep


class Page(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.rows, self.open = [], [], [], []
        self.feed(html)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "wbr"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def written(trials, folder, objective="val_loss", title="sweep of the evening"):
    paths = write_report(trials, folder, title, objective)
    assert paths[-1] == folder / "report.html"
    assert sorted(paths) == sorted(folder.iterdir())
    page = Page(paths[-1].read_text(encoding="utf-8"))
    assert page.open == []
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == len(paths) - 1
    for attrs, path in zip(images, paths, strict=False):
        kind, _, data = attrs["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data) == path.read_bytes()
        assert attrs["alt"]
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20
    return [path.name for path in paths[:-1]], page


@pytest.fixture(scope="module")
def evening(tmp_path_factory):
    trials = sweep(12)
    return trials, *written(trials, tmp_path_factory.mktemp("evening") / "to be made")


def test_all_figures_are_written_and_are_in_the_page(evening):
    _, files, _ = evening
    assert files == [*FIGURES]


def test_the_page_sums_up_and_lists_all_trials_best_first(evening):
    trials, _, page = evening
    counts = [sum(trial.status == status for trial in trials) for status in ("finished", "stopped", "failed")]
    assert "12 trials: {} finished, {} stopped early, {} failed.".format(*counts) in page.text
    first = best(trials, "val_loss")
    assert f"Best: trial {first.number} , validation loss {first.metrics['val_loss']:.4f}" in page.text
    assert [row[0] for row in page.rows[1:]] == [str(trial.number) for trial in ranked(trials, "val_loss")]
    head = page.rows[0]
    assert head[:4] == ["trial", "status", "validation loss", "payload sent per replica"]
    row = dict(zip(head, page.rows[1], strict=True))
    assert row["strategy.topk"] == str(first.params["strategy.topk"])
    assert "strategy.outer_optimizer" not in head
    assert "The same in all trials: strategy. outer_ optimizer nesterov" in page.text
    assert trials[-1].reason in page.text
    assert "python -m jobs.train --config SWEEP/best.yaml" in page.text


def test_the_page_needs_nothing_from_outside_and_runs_nothing(evening):
    _, _, page = evening
    for tag, attrs in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "a")
        assert not {"href", "srcset", "onclick", "onload"} & set(attrs)
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_everything_of_a_users_is_escaped(tmp_path):
    evil = "<script>alert('&\"')</script>\x00\ud800"
    trials = [
        Trial(
            1, evil, "finished", params={evil: evil, "a": 1, "same": evil}, metrics={"val_loss": 1.0, "bytes_up": 1.0}
        ),
        Trial(2, evil, "failed", evil, params={evil: "b", "a": 2, "same": evil}),
    ]
    _, page = written(trials, tmp_path, objective="val_loss", title=evil)
    html = (tmp_path / "report.html").read_text()
    assert html.count("<script") == 0
    assert "\x00" not in html
    assert page.text.count("<script>alert('&\"')</script>") >= 5
    assert "script" not in [tag for tag, _ in page.tags]


def nothing_known(status):
    return [Trial(i, str(i), status, "out of memory\n  at line 3" * (status == "failed")) for i in (1, 2)]


def not_finite():
    history = tuple(Point(i, i, math.nan, math.inf, i, i) for i in range(3))
    return [Trial(1, "1", "finished", params={"a": math.nan}, metrics={"val_loss": math.nan}, history=history)]


CASES = {
    "no trial": ([], [], "No trial was started."),
    "all failed": (nothing_known("failed"), [], "2 trials: 0 finished, 0 stopped early, 2 failed."),
    "nothing known": (nothing_known("stopped"), [], "There is no best trial"),
    "not finite": (not_finite(), [], "No trial reported a finite loss"),
    "one trial": (sweep(1, failed=0), [*FIGURES[:3]], "1 trial: 1 finished"),
    "one replica": ([*sweep(2, replicas=1)], [*FIGURES[:2], FIGURES[3]], "No bytes were sent"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_sweep_of_which_little_is_known_gets_a_report_that_says_so(tmp_path, case):
    trials, files, sentence = CASES[case]
    found, page = written(trials, tmp_path)
    assert found == files
    assert sentence in page.text


def test_figures_of_an_earlier_report_do_not_stay(tmp_path):
    written(sweep(3), tmp_path)
    (tmp_path / "mine.txt").write_text("stays")
    paths = write_report(nothing_known("failed"), tmp_path, "again", "val_loss")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "report.html"]
    assert paths == [tmp_path / "report.html"]


def test_an_objective_that_not_all_reached_ranks_those_that_did_first(tmp_path):
    trials = sweep(4, failed=0)
    reached = {2: 5000.0, 3: 4000.0}
    trials = [
        replace(t, status="finished", metrics={**t.metrics, "bytes_to_loss": reached[t.number]})
        if t.number in reached
        else replace(t, status="finished")
        for t in trials
    ]
    assert [trial.number for trial in ranked(trials, "bytes_to_loss")] == [3, 2, 1, 4]
    assert best(trials, "bytes_to_loss").number == 3
    assert best(trials, "never_reported") is None


def test_ranking_puts_finished_before_stopped_and_failed_last():
    def trial(number, status, loss=None):
        return Trial(number, str(number), status, metrics={} if loss is None else {"val_loss": loss})

    trials = [
        trial(1, "failed", 0.1),
        trial(2, "stopped", 0.2),
        trial(3, "finished", 0.9),
        trial(4, "finished", math.nan),
        trial(5, "finished", 0.8),
        trial(6, "failed"),
        trial(7, "finished", 0.8),
    ]
    assert [t.number for t in ranked(trials, "val_loss")] == [5, 7, 3, 2, 4, 1, 6]


def test_matplotlib_is_left_as_it_was(tmp_path):
    code = (
        "import sys, warnings, matplotlib, pathlib; warnings.simplefilter('error')\n"
        "matplotlib.rcParams['text.usetex'] = True; matplotlib.rcParams['font.size'] = 31\n"
        "before = matplotlib.rcParams.copy()\n"
        "from ray_lowcomm.tuning.report import FIGURES, write_report\n"
        "from ray_lowcomm.tuning.trials import Trial\n"
        "trials = [Trial(i, '', 'finished', params={'名': i}, metrics={'val_loss': 1.0 * i, 'bytes_up': 2.0 - i})"
        " for i in (1, 2)]\n"
        f"write_report(trials, pathlib.Path({str(tmp_path)!r}), 't', 'val_loss')\n"
        "assert matplotlib.rcParams.copy() == before\n"
        "print('matplotlib.pyplot' in sys.modules, matplotlib.get_backend(auto_select=False))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "None"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parallel_coordinates.png", "pareto.png", "report.html"]
