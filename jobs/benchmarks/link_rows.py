"""The rows of `jobs.benchmark link`: which strategies are run, what is made of their runs, and what must hold."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jobs.benchmarks.link_run import Done, Task
from jobs.benchmarks.link_traffic import binned, peak_over_mean
from jobs.benchmarks.links import Crossed, Sample

DDP, DILOCO, BLOCKING, OVERLAPPED, FRAGMENTS = "ddp", "diloco", "topk_diloco", "overlapped", "fragments"
NAMES = (DDP, DILOCO, BLOCKING, OVERLAPPED, FRAGMENTS)
DENSE_ROUNDS = 2  # measured of DDP and dense DiLoCo: each may take minutes, and all are alike
LONE_STEPS = 16
LONES = tuple(  # two runs that exchange next to nothing, in few rounds and in many
    Task({"name": "topk_diloco", "inner_steps": h}, LONE_STEPS, {"layers": 1, "width": 16, "heads": 1}, 0.4, LONE_STEPS)
    for h in (LONE_STEPS // 2, 1)
)

BLOCKING_FROM, BLOCKING_TO = 0.55, 0.65  # where the others are judged
LEAST = {OVERLAPPED: 0.95, FRAGMENTS: 0.97}
MOST_PEAK, LEDGER_WITHIN = 1.5, 0.05
FILLED = ((0.90, 1e6, 20), (0.75, 2e5, 4))  # least share of a link, for messages of so many bytes and of what the link
# carries in so many round trips: below that latency and a slow start count
BINS = 10  # in the time of a round's inner steps
MESSAGE_OF_1B, STEP_OF_1B = 23e6, 0.5  # bytes of a message of topk_diloco's defaults, seconds of a step

COUNTS = ("parameters", "rounds_due")

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What all rows have in common. `step_s`: None for real forward and backward passes."""

    model: dict[str, Any]
    step_s: float | None
    inner_steps: int
    topk: int
    value_bits: int
    fragments: int
    rounds: int

    def strategy(self, name: str) -> dict[str, Any]:
        """Its fields."""
        if name == DDP:
            return {"name": "ddp"}
        if name == DILOCO:
            return {"name": "diloco", "inner_steps": self.inner_steps}
        sent = {"topk": self.topk, "value_bits": self.value_bits}
        blocking = {"name": "topk_diloco", "inner_steps": self.inner_steps, **sent}
        if name == OVERLAPPED:
            return {**blocking, "overlap_steps": self.inner_steps}
        if name == FRAGMENTS:
            shift = max(1, self.inner_steps // self.fragments)
            return {**blocking, "fragments": self.fragments, "overlap_steps": shift}
        return blocking

    def window(self, name: str) -> tuple[int, int]:
        """What is measured: from the end of the first round's inner steps to that of the last measured one's."""
        period = 1 if name == DDP else self.inner_steps
        rounds = min(self.rounds, DENSE_ROUNDS) if name in (DDP, DILOCO) else self.rounds
        return period, period * (rounds + 1)

    def task(self, name: str) -> Task:
        """A run. What overlaps ends with an exchange that has nothing beside it, after the window."""
        last = self.window(name)[1]
        steps = last + self.inner_steps if name in (OVERLAPPED, FRAGMENTS) else last
        return Task(self.strategy(name), steps, self.model, self.step_s, last)

    def launches(self, name: str) -> int:
        """Rounds that this run consists of."""
        parts = self.fragments if name == FRAGMENTS else 1
        return self.task(name).steps // self.window(name)[0] * parts


@dataclass(frozen=True)
class Seen:
    """What the links saw of a run: what has crossed each, and samples over time."""

    crossed: list[Crossed]
    samples: list[Sample]


@dataclass(frozen=True)
class Own:
    """What Ray itself sends over one link in one direction, in bytes without headers: so many for a run to begin and to
    end, and between so many a second and so many a round."""

    ends: float
    per_s: float
    per_round: float

    def of(self, train_s: float, rounds: int) -> float:
        """Bytes of a run that trains so long in so many rounds."""
        return self.ends + self.per_s * train_s + self.per_round * rounds


@dataclass(frozen=True)
class Quiet:
    """A run that exchanges next to nothing: bytes by link and direction (up, then down), without what it counts itself,
    while it trained and besides."""

    within: list[float]
    besides: list[float]
    train_s: float
    rounds: int

    @classmethod
    def of(cls, done: Done, seen: Seen) -> "Quiet":
        """From a run of `LONES`."""
        begin, end = _trained(done)
        first, last = seen.samples[0].at, seen.samples[-1].at
        (within,) = binned(seen.samples, begin, end, end - begin)
        (whole,) = binned(seen.samples, first, last, last - first)
        sent = [link.payload_up - done.summary["wire_bytes_up"] for link in seen.crossed]
        sent += [link.payload_down - done.summary["wire_bytes_down"] for link in seen.crossed]
        own, shares = np.maximum(sent, 0.0), within / np.maximum(whole, 1.0)
        return cls((own * shares).tolist(), (own * (1 - shares)).tolist(), end - begin, len(done.rounds))


@dataclass(frozen=True)
class Lone:
    """Ray's own traffic by host."""

    up: list[Own]
    down: list[Own]

    @classmethod
    def of(cls, few: Quiet, many: Quiet) -> "Lone":
        """From a run with few rounds and one with many."""
        own = []
        for a, b, ends in zip(few.within, many.within, few.besides, strict=True):
            longer = many.train_s / few.train_s
            per_round = max(0.0, b - longer * a) / (many.rounds - longer * few.rounds)
            own.append(Own(ends, max(0.0, a - per_round * few.rounds) / few.train_s, per_round))
        return cls(own[: len(own) // 2], own[len(own) // 2 :])

    def said(self) -> str:
        """In a line."""
        up, down = (
            (max(own.per_s for own in way) / 1e3, max(own.per_round for own in way) / 1e3)
            for way in (self.up, self.down)
        )
        sent = f"{up[0]:.1f} kB/s and {up[1]:.1f} kB a round up, {down[0]:.1f} and {down[1]:.1f} down"
        return f"Ray alone, on the link with most: {sent}"


@dataclass
class Found:
    """The runs of one strategy on links of one rate, one a turn."""

    name: str
    mbit: float
    window: tuple[int, int]
    runs: list[Row] = field(default_factory=list)

    def add(self, done: Done, seen: Seen, lone: Lone, bench: Bench) -> Row:
        """One more; returns it."""
        run = measured(self.window, done, seen, lone, bench.inner_steps)
        run |= filled(self.name, run["wire_up"] / len(done.rounds), run["exchange_s"], len(done.marks), self.mbit)
        self.runs.append(run | {"rounds": len(done.rounds), "rounds_due": bench.launches(self.name)})
        return self.runs[-1]

    def row(self) -> Row:
        """Means over the runs; `utilisation_least` and `peak_over_mean` are the least and the most of them."""
        row: Row = {"strategy": self.name, "mbit": self.mbit, "runs": len(self.runs)}
        for key in self.runs[0]:
            row[key] = statistics.fmean(run[key] for run in self.runs)
        row["utilisation_least"] = min(run["utilisation"] for run in self.runs)
        row["peak_over_mean"] = max(run["peak_over_mean"] for run in self.runs)
        return row | {name: int(row[name]) for name in COUNTS if name in row}


def measured(window: tuple[int, int], done: Done, seen: Seen, lone: Lone, inner_steps: int) -> Row:
    """The numbers of one run.

    Utilisation, seconds of a step and of a round (as many inner steps as the strategy takes for one) are means over
    replicas; `utilisation_said` is the run's own, of the whole run. `wire_round` is what the run says it has put on a
    link in the time of a round. `ledger_off` is by how much the links' bytes, without headers and what Ray sends
    anyway, differ from the run's own count, up or down, whichever is more.
    """
    first, last = window
    begin, end = max(m.at[first] for m in done.marks), min(m.at[last] for m in done.marks)
    step_s = statistics.fmean(m.step_s(first, last) for m in done.marks)
    rounds = (last - first) // first
    bins = binned(seen.samples, begin, end, step_s * inner_steps / BINS)
    up, down = done.summary["wire_bytes_up"], done.summary["wire_bytes_down"]
    started, ended = _trained(done)
    spent = ended - started, len(done.rounds)
    net_up = max(link.payload_up - own.of(*spent) for link, own in zip(seen.crossed, lone.up, strict=True))
    net_down = max(link.payload_down - own.of(*spent) for link, own in zip(seen.crossed, lone.down, strict=True))
    return {
        "utilisation": statistics.fmean(m.utilisation(first, last) for m in done.marks),
        "utilisation_said": done.summary["utilisation"],
        "step_s": step_s,
        "round_s": (end - begin) / rounds,
        "exchange_s": _mean(done.rounds, "exchange_s"),
        "outer_s": _mean(done.rounds, "outer_s"),
        "wire_round": up * first / done.rounds[-1]["step"],
        "wire_up": up,
        "wire_down": down,
        "net_up": net_up,
        "net_down": net_down,
        "ledger_off": max(abs(net_up / up - 1), abs(net_down / down - 1)),
        "peak_over_mean": peak_over_mean(bins),
        "lost_packets": sum(link.lost for link in seen.crossed),
        "parameters": done.marks[0].parameters,
    }


def filled(name: str, sent: float, exchange_s: float, hosts: int, mbit: float) -> Row:
    """Of an exchange in which each host must send so many bytes: `message`, the bytes that a replica exchanges, and
    `link_filled`, the share that these bytes without headers are of what the link could carry meanwhile."""
    each = 2 * (hosts - 1) / hosts if name in (DDP, DILOCO) else hosts - 1
    return {"message": sent / each, "link_filled": sent / exchange_s / (mbit * 1e6 / 8)}


def _trained(done: Done) -> tuple[float, float]:
    """When the first replica began to train, and the last one ended."""
    return min(marks.at[0] for marks in done.marks), max(marks.at[-1] for marks in done.marks)


def _mean(rounds: Sequence[Mapping[str, Any]], key: str) -> float:
    later = rounds[1:] or rounds
    return statistics.fmean(record[key] for record in later)


def stands_for(wire_round: float, train_s: float, mbit: float, hosts: int, inner_steps: int) -> str:
    """Which cluster a row of `topk_diloco` is like: the same bytes on a link in the time of the same inner steps.

    `wire_round`: bytes that a round puts on a link each way; `train_s`: seconds of its inner steps.
    """
    each = wire_round / train_s
    of_1b = MESSAGE_OF_1B * (hosts - 1) / (inner_steps * STEP_OF_1B)
    size, rate = each / of_1b, mbit * of_1b / each
    return (
        f"like a model of {size:.2g} B parameters on {mbit:g} Mbit/s, or of 1 B on {rate:,.0f} Mbit/s, "
        f"{STEP_OF_1B:g} s a step, with the default's messages ({MESSAGE_OF_1B / 1e6:g} MB of 1 B)"
    )


def problems(rows: Sequence[Row], fragments: int, rtt_s: float) -> list[str]:
    """What does not hold of the limits."""
    wrong = [
        f"{_place(row)}: {row['ledger_off']:.1%} between the links' bytes and the run's own, not at most "
        f"{LEDGER_WITHIN:.0%}"
        for row in rows
        if row["ledger_off"] > LEDGER_WITHIN
    ]
    wrong += [
        f"{_place(row)}: {row['rounds']:g} rounds, where {row['rounds_due']} are due in as many steps"
        for row in rows
        if row["rounds"] != row["rounds_due"]
    ]
    wrong += [
        f"{_place(row)}: {row['link_filled']:.1%} of the link filled by messages of {row['message'] / 1e6:.2f} MB, "
        f"not at least {least:.0%}"
        for row in rows
        if row["link_filled"] < (least := _least_filled(row, rtt_s))
    ]
    for row in _judged(rows):
        least = LEAST[row["strategy"]]
        if row["utilisation"] < least:
            wrong.append(f"{_place(row)}: {row['utilisation']:.1%} utilised, not at least {least:.0%}")
        if row["strategy"] == FRAGMENTS and row["peak_over_mean"] > MOST_PEAK:
            peak = f"{row['peak_over_mean']:.2f} times its mean at the peak, not at most {MOST_PEAK}"
            wrong.append(f"{_place(row)}: traffic is {peak}, in {fragments} fragments")
    return wrong


def _least_filled(row: Row, rtt_s: float) -> float:
    round_trip = row["mbit"] * 1e6 / 8 * rtt_s
    shares = (share for share, size, trips in FILLED if row["message"] >= max(size, trips * round_trip))
    return max(shares, default=0.0)


def unjudged(rows: Sequence[Row]) -> str:
    """Why what overlaps was not judged, if it was not; else ''."""
    if _judged(rows) or not any(row["strategy"] in LEAST for row in rows):
        return ""
    reached = ", ".join(f"{row['utilisation']:.0%} at {row['mbit']:g}" for row in rows if row["strategy"] == BLOCKING)
    where = f"between {BLOCKING_FROM:.0%} and {BLOCKING_TO:.0%}"
    return f"what overlaps is judged where blocking topk_diloco is {where} utilised; it is {reached or 'not run'}"


def _judged(rows: Sequence[Row]) -> list[Row]:
    blocking = {row["mbit"]: row["utilisation"] for row in rows if row["strategy"] == BLOCKING}
    here = {mbit for mbit, reached in blocking.items() if BLOCKING_FROM <= reached <= BLOCKING_TO}
    return [row for row in rows if row["mbit"] in here and row["strategy"] in LEAST]


def _place(row: Row) -> str:
    return f"{row['strategy']} at {row['mbit']:g} Mbit/s"


def settings_of(bench: Bench, hosts: int, rtt_ms: float) -> Row:
    """For the JSON file."""
    return {**asdict(bench), "hosts": hosts, "rtt_ms": rtt_ms}
