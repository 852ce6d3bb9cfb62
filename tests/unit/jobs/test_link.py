"""The benchmark of slow links: what it measures of a run, what it judges, what it says. No measurement is judged."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from jobs import benchmark
from jobs.benchmarks import link, link_loop, link_rows
from jobs.benchmarks.link_figure import draw
from jobs.benchmarks.link_loop import InnerClock, Loop, Marks
from jobs.benchmarks.link_rows import DDP, DILOCO, FRAGMENTS, NAMES, OVERLAPPED, Bench, Found, Lone, Own, Quiet, Seen
from jobs.benchmarks.link_run import Done
from jobs.benchmarks.link_traffic import binned, peak_over_mean
from jobs.benchmarks.links import HEADERS, Crossed, Sample
from ray_lowcomm import LowCommTrainer
from ray_lowcomm.core.errors import FleetError, SettingError

BENCH = Bench(
    model={"layers": 1, "width": 16, "heads": 1},
    step_s=0.01,
    inner_steps=16,
    topk=100,
    value_bits=1,
    fragments=8,
    rounds=3,
)


class Silent:
    def __init__(self, *_):
        pass

    on_start = on_round = on_notice = __init__

    def on_end(self, summary):
        return dict(summary)


def train(loop, steps, strategy, tmp_path):
    """One replica in this process."""
    LowCommTrainer(
        loop,
        steps,
        strategy=strategy,
        fleet={"replicas": 1, "transport": "local"},
        run={"output_dir": str(tmp_path), "eval_every": 0},
        checkpoint={"every": 0},
        recorder=Silent,
    ).fit()
    return loop.marks


@pytest.mark.parametrize("strategy", [{"name": "topk_diloco", "inner_steps": 3, "topk": 50}, {"name": "ddp"}])
def test_each_inner_step_is_marked_and_sleeps_until_the_end_of_the_window(tmp_path, strategy):
    marks = train(Loop(BENCH.model, 0.05, until=4), 6, strategy, tmp_path)
    assert len(marks.at) == len(marks.inner) == 7
    assert marks.at == sorted(marks.at)
    took = np.diff(marks.inner)
    assert (took > 0).all()
    assert (took[:4] >= 0.05).all()
    assert marks.inner[-1] <= marks.at[-1] - marks.at[0]
    assert marks.parameters == sum(p.numel() for p in link_model().parameters())


def link_model():
    from ray_lowcomm.core.settings import ModelSettings
    from ray_lowcomm.models import build

    return build(ModelSettings(args=BENCH.model))


def test_without_a_sleep_forward_and_backward_are_done(tmp_path):
    marks = train(Loop(BENCH.model, None, until=4), 4, {"name": "topk_diloco", "inner_steps": 2, "topk": 50}, tmp_path)
    assert len(marks.at) == 5
    assert (np.diff(marks.inner) > 0).all()


def test_only_what_is_timed_counts_also_if_it_fails(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(link_loop.time, "perf_counter", lambda: now[0])

    def take(seconds):
        now[0] += seconds
        return 1 / (seconds - 2.0)

    clock = InnerClock()
    assert clock.timed(take)(3.0) == 1.0
    now[0] += 100.0
    with pytest.raises(ZeroDivisionError):
        clock.timed(take)(2.0)
    clock.mark()
    assert clock.inner == [5.0]


def test_utilisation_is_of_the_window_alone():
    marks = Marks(at=[0.0, 50.0, 60.0, 70.0, 900.0], inner=[0.0, 1.0, 9.0, 16.0, 17.0], parameters=1)
    assert marks.utilisation(1, 3) == 0.75
    assert marks.step_s(1, 3) == 7.5


def test_traffic_is_cut_into_bins_and_its_peak_is_of_the_worst_link():
    samples = [Sample(t, (int(10 * t), 0), (0, 0)) for t in (0.0, 1.0, 2.0, 3.0)]
    samples.append(Sample(4.0, (90, 0), (0, 8)))
    bins = binned(samples, 1.0, 4.0, 0.9)
    assert bins.shape == (3, 4)
    assert bins[:, 0].tolist() == [10.0, 10.0, 60.0]
    assert bins[:, 3].tolist() == [0.0, 0.0, 8.0]
    assert peak_over_mean(bins) == 3.0
    assert peak_over_mean(bins[:, :1]) == 60 / (80 / 3)
    assert peak_over_mean(np.zeros((3, 2))) == 1.0
    halves = binned(samples, 0.5, 1.5, 0.5)
    assert halves[:, 0].tolist() == [5.0, 5.0]  # between two samples


def test_the_rows_ask_for_what_they_are_called():
    tasks = {name: BENCH.task(name) for name in NAMES}
    assert tasks[DDP].steps == 3  # the first round and two that are measured
    assert tasks[DILOCO].steps == 48
    assert tasks["topk_diloco"].steps == 64
    assert tasks[OVERLAPPED].strategy["overlap_steps"] == 16
    assert (tasks[FRAGMENTS].strategy["fragments"], tasks[FRAGMENTS].strategy["overlap_steps"]) == (8, 2)
    assert tasks[FRAGMENTS].steps == tasks[OVERLAPPED].steps == 80
    assert {task.until for name, task in tasks.items() if name not in (DDP, DILOCO)} == {64}
    assert BENCH.window(FRAGMENTS) == (16, 64)
    assert tasks["topk_diloco"].settings.topk == 100
    assert [BENCH.launches(name) for name in NAMES] == [3, 3, 4, 5, 40]


def a_run():
    """Two replicas, H = 4, one measured round of 8 s with 4 s in inner steps."""
    at = [0.0, 1.0, 2.0, 3.0, 10.0, 11.0, 12.0, 13.0, 18.0]
    marks = [Marks(at, [float(k) for k in range(9)], 50), Marks(at, [0.0, 1, 2, 3, 4, 5, 6, 7, 10], 50)]
    summary = {"wire_bytes_up": 10_000, "wire_bytes_down": 10_000, "utilisation": 0.75}
    rounds = [{"step": 4, "exchange_s": 9.0, "outer_s": 9.0}, {"step": 8, "exchange_s": 3.0, "outer_s": 0.5}]
    links = [crossed(10_000 + 18 * 50 + 70, 9_000), crossed(9_000, 9_900 + 18 * 10)]
    samples = [Sample(0.0, (0, 0), (0, 0)), Sample(18.0, (1800, 0), (0, 0))]
    return Done(marks, summary, rounds), Seen(links, samples)


def crossed(up, down):
    return Crossed(up + HEADERS * 7, 7, down + HEADERS * 3, 3)


def test_what_is_made_of_a_run():
    none, (done, seen) = Own(0.0, 0.0, 0.0), a_run()
    found = Found("topk_diloco", 20.0, (4, 8))
    found.add(
        done,
        seen,
        Lone([Own(60.0, 50.0, 5.0), none], [none, Own(0.0, 10.0, 0.0)]),
        replace(BENCH, inner_steps=4, rounds=1),
    )
    row = found.row()
    assert (row["rounds"], row["rounds_due"]) == (2, 2)
    assert row["utilisation_said"] == 0.75
    assert row["utilisation"] == pytest.approx((4 + 6) / 2 / 8)
    assert row["step_s"] == pytest.approx(1.25)
    assert row["round_s"] == 8.0
    assert (row["exchange_s"], row["outer_s"]) == (3.0, 0.5)
    assert row["wire_round"] == 5000
    assert (row["net_up"], row["net_down"]) == (10_000, 9_900)
    assert row["ledger_off"] == pytest.approx(0.01)
    assert row["peak_over_mean"] == pytest.approx(1.0)
    assert (row["runs"], row["parameters"]) == (1, 50)
    assert row["message"] == 5000  # to one other host
    assert row["link_filled"] == pytest.approx(5000 / 3.0 / 2.5e6)


def test_of_several_runs_the_mean_counts_and_of_peaks_the_worst():
    found = Found("topk_diloco", 20.0, (4, 8))
    for used, peak in ((0.5, 1.2), (0.7, 1.4)):
        found.runs.append({"utilisation": used, "peak_over_mean": peak, "parameters": 50})
    row = found.row()
    assert (row["utilisation"], row["utilisation_least"], row["peak_over_mean"]) == (0.6, 0.5, 1.4)


def test_what_ray_sends_anyway_is_told_from_runs_that_exchange_next_to_nothing():
    done, seen = a_run()
    # from a time before training on: a third of what host 0 sends, nothing of what host 1 is sent; 18 s of training
    samples = [Sample(-9.0, (0, 0), (0, 0)), Sample(0.0, (30, 0), (0, 0)), Sample(18.0, (90, 0), (0, 5))]
    done = replace(done, summary={"wire_bytes_up": 10_700, "wire_bytes_down": 9_900})
    quiet = Quiet.of(done, replace(seen, samples=samples))
    assert quiet.within == pytest.approx([180.0, 0.0, 0.0, 180.0])
    assert quiet.besides == pytest.approx([90.0, 0.0, 0.0, 0.0])
    assert (quiet.train_s, quiet.rounds) == (18.0, 2)


def test_seconds_and_rounds_are_told_apart():
    few = Quiet(within=[10 * 8.0 + 2 * 30.0, 0.0], besides=[500.0, 0.0], train_s=8.0, rounds=2)
    many = Quiet(within=[10 * 16.0 + 20 * 30.0, 0.0], besides=[400.0, 0.0], train_s=16.0, rounds=20)
    lone = Lone.of(few, many)
    assert lone.up == [Own(500.0, 10.0, 30.0)]
    assert lone.down == [Own(0.0, 0.0, 0.0)]
    assert lone.up[0].of(4.0, 3) == 500 + 40 + 90
    assert lone.said() == "Ray alone, on the link with most: 0.0 kB/s and 0.0 kB a round up, 0.0 and 0.0 down"
    thousands = Lone([Own(0.0, 1500.0, 0.0), Own(0.0, 0.0, 2600.0)], [Own(9.0, 20.0, 5000.0)])
    assert thousands.said().endswith("1.5 kB/s and 2.6 kB a round up, 0.0 and 5.0 down")


def row(strategy, used, mbit=20.0, peak=1.2, off=0.01):
    return {
        "strategy": strategy,
        "utilisation": used,
        "mbit": mbit,
        "peak_over_mean": peak,
        "ledger_off": off,
        "step_s": 0.1,
        "parameters": 10**6,
        "rounds": 5.0,
        "rounds_due": 5,
        "message": 1e4,
        "link_filled": 0.5,
    }


def test_what_overlaps_is_judged_where_blocking_is_within_its_range():
    good = [row("topk_diloco", 0.6), row(OVERLAPPED, 0.95), row(FRAGMENTS, 0.97, peak=1.5)]
    assert link_rows.problems(good, 8, 0.02) == []
    assert link_rows.unjudged(good) == ""
    bad = [row("topk_diloco", 0.6), row(OVERLAPPED, 0.949), row(FRAGMENTS, 0.969, peak=1.51)]
    assert link_rows.problems(bad, 8, 0.02) == [
        "overlapped at 20 Mbit/s: 94.9% utilised, not at least 95%",
        "fragments at 20 Mbit/s: 96.9% utilised, not at least 97%",
        "fragments at 20 Mbit/s: traffic is 1.51 times its mean at the peak, not at most 1.5, in 8 fragments",
    ]
    assert link_rows.problems([row("topk_diloco", 0.66), *bad[1:]], 8, 0.02) == []
    assert link_rows.problems([row("topk_diloco", 0.6, mbit=5.0), *bad[1:]], 8, 0.02) == []
    assert "it is 66% at 20" in link_rows.unjudged([row("topk_diloco", 0.66), *bad[1:]])
    assert link_rows.unjudged([row("topk_diloco", 0.66)]) == ""


def test_the_ledger_is_judged_everywhere():
    (said,) = link_rows.problems([row(DDP, 0.01, off=0.051), row(DILOCO, 0.1, off=0.05)], 8, 0.02)
    assert said == "ddp at 20 Mbit/s: 5.1% between the links' bytes and the run's own, not at most 5%"


def test_a_gather_sends_its_message_to_all_others_and_a_mean_its_shards_twice():
    assert link_rows.filled("topk_diloco", 3e6, 1.5, 4, 20.0) == {"message": 1e6, "link_filled": pytest.approx(0.8)}
    assert link_rows.filled(DILOCO, 3e6, 1.5, 4, 20.0) == {"message": 2e6, "link_filled": pytest.approx(0.8)}
    assert link_rows.filled(DDP, 3e6, 1.0, 2, 100.0) == {"message": 3e6, "link_filled": pytest.approx(0.24)}


def test_the_link_must_be_filled_where_messages_are_large_for_it():
    def said(message, filled, mbit=20.0, rtt_s=0.02):
        return link_rows.problems([row(DILOCO, 0.5, mbit) | {"message": message, "link_filled": filled}], 8, rtt_s)

    assert said(1e6, 0.9) == said(0.99e6, 0.75) == said(2e5, 0.75) == said(1.99e5, 0.1) == []
    assert said(1e6, 0.899) == [
        "diloco at 20 Mbit/s: 89.9% of the link filled by messages of 1.00 MB, not at least 90%"
    ]
    assert said(2e5, 0.749) == [
        "diloco at 20 Mbit/s: 74.9% of the link filled by messages of 0.20 MB, not at least 75%"
    ]
    # five times as much is on its way: 1 MB is 4 round trips
    assert said(1e6, 0.75, mbit=100.0) == said(1e6, 0.75, rtt_s=0.1) == []
    assert len(said(1e6, 0.74, mbit=100.0)) == len(said(5e6, 0.89, mbit=100.0)) == 1
    assert said(5e4, 0.1, mbit=5.0) == []


def test_rounds_that_were_not_launched_are_noticed():
    (said,) = link_rows.problems([row(OVERLAPPED, 0.99) | {"rounds": 2.5}], 8, 0.02)
    assert said == "overlapped at 20 Mbit/s: 2.5 rounds, where 5 are due in as many steps"


def test_a_row_says_which_cluster_it_is_like():
    # the default's messages of 1 B to three others, every 16 steps of 0.5 s: 69 MB in 8 s; here a tenth of that
    text = link_rows.stands_for(wire_round=6.9e6 / 4, train_s=2.0, mbit=20, hosts=4, inner_steps=16)
    assert text.startswith("like a model of 0.1 B parameters on 20 Mbit/s, or of 1 B on 200 Mbit/s, 0.5 s a step")


def test_an_error_on_the_hosts_is_raised_here():
    with pytest.raises(FleetError, match="the disk is full"):
        Done.of(json.dumps({"error": "the disk is full"}))
    done, _ = a_run()
    assert Done.of(json.dumps(asdict(done))) == done


def test_where_there_can_be_no_hosts_it_says_so_and_does_not_fail(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(link, "lacking", lambda: "network namespaces take root")
    file = tmp_path / "numbers.json"
    assert benchmark.main(["link", "--strategies", "topk_diloco", "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == {"skipped": "network namespaces take root"}
    assert "link: nothing is measured: network namespaces take root" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--mbit", "20", "0"], r"--mbit = 0\.0: must be between"),
        (["--hosts", "1"], "--hosts = 1: must be between 2 and 64"),
        (["--model", "3"], "--model = '3': must be a YAML mapping"),
        (["--topk", "70000"], "topk"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(monkeypatch, argv, said):
    monkeypatch.setattr(link, "lacking", lambda: pytest.fail("looked at the machine"))
    with pytest.raises(SettingError, match=said):
        benchmark.main(["link", "--strategies", "topk_diloco", *argv])


def test_the_picture_has_a_line_for_each_strategy(tmp_path):
    rows = [row(DDP, 0.5, mbit=100.0), row(DDP, 0.1, mbit=5.0), row("topk_diloco", 0.9, mbit=5.0)]
    figure = draw(rows, "four hosts", tmp_path / "link.png")
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [DDP, "topk_diloco"]
    assert axes.lines[0].get_xdata().tolist() == [5.0, 100.0]
    assert axes.lines[0].get_ydata().tolist() == [10.0, 50.0]
    assert (tmp_path / "link.png").read_bytes().startswith(b"\x89PNG")
