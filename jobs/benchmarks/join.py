"""What it costs when replicas join a run that is going on: real Ray hosts on links of a set rate.

Each host is a network namespace on this machine with a Ray node of its own, as in `link`. Four replicas train with
topk_diloco, rounds overlapped. Others join, each on a host of its own, without the moments of the inner optimizer: what
they load is the anchor and the outer momentum, 8 bytes a parameter. One alone; one while two of those that give are
killed; four at once; one that is killed half-way; and one whose place another process takes meanwhile.

Seconds are those from the first piece asked for to the last one there, and the share of the link filled is that of the
state's bytes in what the link carries meanwhile; headers take 5%. `utilised` is the time in inner steps of the others
meanwhile; a sleep takes the place of forward and backward. What is left are bytes in the stores of Ray on all hosts,
and offers that the driver keeps, at the end of the last round. Needs what `link` does; else nothing is measured.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from jobs.benchmarks.join_run import Loaded, Scene, Seen
from jobs.benchmarks.link_hosts import RayHosts
from jobs.benchmarks.link_loop import model_args, utilised
from jobs.benchmarks.links import Links, lacking
from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.models import build

SAYS = "what it costs when replicas join, over slow links"
ONE, DONORS_KILLED, FOUR, KILLED, TWICE = "one", "donors_killed", "four", "joiner_killed", "twice"
NAMES = (ONE, DONORS_KILLED, FOUR, KILLED, TWICE)
DONORS, AFTER = 4, 1
HOSTS, TABLE_WIDTH = 2 * DONORS, 120
BYTES, BYTES_WITHIN = 8, 0.03  # of each parameter: the anchor's and the outer momentum's
LEAST_FILLED, LEAST_UTILISED, MOST_UNEVEN = 0.7, 0.95, 1.25
MOST_LEFT = 1000  # bytes: where processes died Ray's stores may keep a few that say so
SAID_TWICE = "another process has joined in its place"

Row = dict[str, Any]


@dataclass(frozen=True)
class Stand:
    """What all scenes have in common."""

    model: dict[str, Any]
    parameters: int
    step_s: float
    inner_steps: int
    rounds: int

    def scene(self, name: str) -> Scene:
        """One of `NAMES`."""
        scenes: dict[str, dict[str, Any]] = {
            ONE: {},
            DONORS_KILLED: {"kills": (0, DONORS - 1)},
            FOUR: {"joiners": 4},
            KILLED: {"kills": (DONORS,)},
            TWICE: {"twice": True},
        }
        strategy = {"name": "topk_diloco", "inner_steps": self.inner_steps, "overlap_steps": self.inner_steps}
        common: dict[str, Any] = {
            "model": self.model,
            "step_s": self.step_s,
            "donors": DONORS,
            "joiners": 1,
            "after": AFTER,
        }
        steps = self.rounds * self.inner_steps
        return Scene(strategy=strategy, steps=steps, nbytes=BYTES * self.parameters, **(common | scenes[name]))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    add = parser.add_argument
    add("--mbit", type=float, default=100.0, help="rate of the links, each way (default 100)")
    add("--rtt-ms", type=float, default=20.0, help="round-trip time between two hosts (default 20)")
    add("--scenes", nargs="+", choices=NAMES, default=list(NAMES), help="(default all)")
    add("--model", default="{layers: 6, width: 256, heads: 2, tied: true}", help="model.args of the byte GPT, in YAML")
    add("--step-s", type=float, default=0.25, help="seconds of sleep in the place of a step's compute (default 0.25)")
    add("--inner-steps", type=int, default=16, help="H (default 16)")
    add("--rounds", type=int, default=9, help="of each run (default 9)")


def run(options: argparse.Namespace, console: Console) -> tuple[Row, list[str]]:
    """(numbers, what does not hold)."""
    stand = _stand(options)
    for name in options.scenes:
        _ = stand.scene(name).settings  # a setting that cannot be is said now
    if reason := lacking():
        console.print(f"join: nothing is measured: {reason}", highlight=False, soft_wrap=True)
        return {"skipped": reason}, []
    rows = []
    with Links(HOSTS, options.rtt_ms / 1e3) as links, RayHosts(links, "jobs.benchmarks.join_run") as hosts:
        links.shape(options.mbit)
        for name in options.scenes:
            began, scene = time.monotonic(), stand.scene(name)
            seen = Seen.of(hosts.ask(json.dumps(asdict(scene))))
            rows.append(row_of(name, scene, seen, options.mbit))
            console.print(f"{name}: {time.monotonic() - began:.0f} s", highlight=False)
    wide = Console(file=console.file, width=max(console.width, TABLE_WIDTH))
    wide.print(_title(stand, options), _table(rows), highlight=False)
    settings = {**asdict(stand), "mbit": options.mbit, "rtt_ms": options.rtt_ms}
    return {"settings": settings, "rows": rows}, problems(rows)


def row_of(name: str, scene: Scene, seen: Seen, mbit: float) -> Row:
    """The numbers of one scene.

    `bytes` a parameter are those of the joiner that is farthest from 8, `seconds` those of the slowest, `filled` is the
    least, `utilised` the mean over the others, of the joiner during whose loading it was least. `uneven`: what the
    member that gave most of a state gave, over the mean of those that gave.
    """
    stay = [str(member) for member in range(scene.donors) if member not in scene.kills]
    parameters, rate = scene.nbytes / BYTES, mbit * 1e6 / 8
    windows = [(each.at - each.seconds, each.at) for each in seen.loaded]
    if name == KILLED:  # from then on until a round has ended without it
        windows = [(seen.disturbed, seen.disturbed + scene.step_s * scene.strategy["inner_steps"])]
    others = [utilised([seen.marks[member] for member in stay], *window) for window in windows]
    sizes = [each.nbytes / parameters for each in seen.loaded]
    came = {each.member for each in seen.loaded} & set(seen.rounds[-1]["members"])
    first, last = seen.held[0], seen.held[-1]  # of an earlier scene's killed donors Ray may still keep a piece
    return {
        "scene": name,
        "parameters": int(parameters),
        "joined": len(came),
        "due": 0 if name == KILLED else scene.joiners,
        "bytes": max(sizes, key=lambda size: abs(size - BYTES), default=None),
        "seconds": max((each.seconds for each in seen.loaded), default=None),
        "filled": min((each.nbytes / each.seconds / rate for each in seen.loaded), default=None),
        "utilised": min(others, default=None),
        "given": _given(seen.loaded),
        "uneven": _uneven(seen.loaded),
        "digests": len(set(seen.summary["state_digests"].values())),
        "ended": len(seen.summary["state_digests"]),
        "ends_due": len(stay) + (0 if name == KILLED else scene.joiners),
        "retried": seen.summary["rounds_retried"],
        "left": max(0, sum(last["stores"]) - sum(first["stores"])),
        "offers": last["states"] + last["past"] + last["answers"],
        "told": any(SAID_TWICE in text for text in seen.notices),
        "notices": seen.notices,
        "loaded": [asdict(each) for each in seen.loaded],
        "held": seen.held,
    }


def problems(rows: Sequence[Row]) -> list[str]:
    """What does not hold of the limits."""
    return [f"{row['scene']}: {text}" for row in rows for text in _wrong(row)]


def _wrong(row: Row) -> list[str]:
    found = []
    if row["joined"] != row["due"]:
        found.append(f"{row['joined']} joined in time, not {row['due']}")
    if (row["digests"], row["ended"]) != (1, row["ends_due"]):
        found.append(f"{row['ended']} of {row['ends_due']} replicas came to the end, in {row['digests']} states, not 1")
    if row["bytes"] is not None and abs(row["bytes"] / BYTES - 1) > BYTES_WITHIN:
        found.append(f"{row['bytes']:.2f} bytes a parameter, not {BYTES} within {BYTES_WITHIN:.0%}")
    if row["filled"] is not None and row["filled"] < LEAST_FILLED:
        found.append(f"{row['filled']:.1%} of a joiner's link filled, not at least {LEAST_FILLED:.0%}")
    if row["utilised"] is not None and row["utilised"] < LEAST_UTILISED:
        found.append(f"the others were utilised by {row['utilised']:.1%}, not at least {LEAST_UTILISED:.0%}")
    if row["scene"] == FOUR and row["uneven"] > MOST_UNEVEN:
        found.append(f"a member gave {row['uneven']:.2f} times the mean, not at most {MOST_UNEVEN}")
    if row["scene"] == KILLED and (row["left"] > MOST_LEFT or row["offers"]):
        found.append(f"{row['left']:,} bytes are left in the stores, and {row['offers']} offers, not 0")
    if row["scene"] == TWICE and not row["told"]:
        found.append(f"nobody said that {SAID_TWICE}")
    return found


def _given(loaded: Sequence[Loaded]) -> dict[str, dict[str, int]]:
    """Bytes by the round whose state it was, and the member that gave them."""
    found: dict[str, dict[str, int]] = {}
    for each in loaded:
        given = Counter(found.get(str(each.round), {}))
        given.update(each.given)
        found[str(each.round)] = dict(sorted(given.items()))
    return found


def _uneven(loaded: Sequence[Loaded]) -> float:
    shares = [list(given.values()) for given in _given(loaded).values()]
    return max((max(share) / statistics.fmean(share) for share in shares), default=0.0)


def _stand(options: argparse.Namespace) -> Stand:
    model = model_args(options.model)
    parameters = sum(parameter.numel() for parameter in build(ModelSettings(args=model)).parameters())
    return Stand(model, parameters, options.step_s, options.inner_steps, options.rounds)


def _title(stand: Stand, options: argparse.Namespace) -> str:
    where = f"{DONORS} hosts, {options.mbit:g} Mbit/s, {options.rtt_ms:g} ms"
    return f"{where}, {stand.parameters:,} parameters, H = {stand.inner_steps}, {stand.step_s:g} s a step"


COLUMNS = ("", "joined", "bytes", "seconds", "link filled", "utilised", "most/mean", "ended", "retried", "left MB")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(
            row["scene"],
            f"{row['joined']} of {row['due']}",
            _or_none(row["bytes"], ".3f"),
            _or_none(row["seconds"], ".2f"),
            _or_none(row["filled"], ".1%"),
            _or_none(row["utilised"], ".1%"),
            _or_none(row["uneven"] or None, ".2f"),
            f"{row['ended']} of {row['ends_due']}",
            str(row["retried"]),
            f"{row['left'] / 1e6:.1f}",
        )
    return table


def _or_none(number: float | None, how: str) -> str:
    return "-" if number is None else format(number, how)
