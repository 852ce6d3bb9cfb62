import io

from rich.console import Console

from ray_lowcomm.tuning.screen import Refused
from ray_lowcomm.tuning.show import Show
from ray_lowcomm.tuning.trials import Trial

TRIALS = [
    Trial(
        number,
        f"id{number}",
        status,
        reason,
        {
            "strategy.name": "dct_momentum",
            "strategy.topk": number,
            "strategy.chunk_size": 64,
            "inner.betas": "(0.9, 0.99)",
        },
        metrics,
    )
    for number, status, reason, metrics in (
        (1, "finished", "", {"val_loss": 2.5, "bytes_up": 2048.0, "step": 32.0}),
        (2, "failed", "replica 1 died", {}),
        (3, "stopped", "stopped by asha at round 2", {"val_loss": 2.0, "bytes_up": 512.0, "step": 8.0}),
        (4, "finished", "", {"val_loss": 2.25, "bytes_up": 4096.0, "step": 32.0}),
    )
]


def shown(do, terminal=False):
    out = io.StringIO()
    show = Show("val_loss", 32, Console(file=out, force_terminal=terminal, width=100, highlight=False, emoji=False))
    show.expect(4, ["strategy.topk"])
    do(show)
    return out.getvalue()


def test_a_line_a_trial():
    def do(show):
        for trial in TRIALS:
            show.started(trial)
            show.ended(trial)

    lines = shown(do).splitlines()
    assert lines[0] == (
        "trial 1 finished  val_loss 2.5000  bytes_up 2.0 KiB  step 32  topk=1 chunk_size=64 inner.betas=(0.9, 0.99)"
    )
    assert lines[1].endswith("(replica 1 died)")
    assert lines[2].endswith("(stopped by asha at round 2)")
    assert len(lines) == 4


def test_the_table_has_the_best_first_and_what_differs():
    lines = shown(lambda show: show.table(TRIALS)).splitlines()
    assert lines[0].split() == ["trial", "status", "val_loss", "bytes_up", "step", "topk"]
    assert [line.split()[0] for line in lines[1:5]] == ["4", "1", "3", "2"]
    assert lines[1].split() == ["4", "finished", "2.2500", "4.0", "KiB", "32", "4"]
    assert lines[4].split() == ["2", "failed", "–", "–", "–", "2"]
    assert lines[5:] == ["trial 2 failed: replica 1 died"]


def test_refusals_are_not_a_flood():
    def do(show):
        for number in range(50):
            show.refused(Refused({"strategy.topk": number, "model.name": "a:boom:b"}, "0.3 < 0.9 [all]"))

    lines = shown(do).splitlines()
    assert lines[0] == "refused: topk=0 model.name=a:boom:b: 0.3 < 0.9 [all]"
    assert len(lines) == 6
    assert "refused.jsonl" in lines[5]


def test_the_live_line_of_a_terminal():
    def do(show):
        show.start()
        show.started(TRIALS[0])
        show.reported(TRIALS[0], {})
        show.ended(TRIALS[2])
        show._live.refresh()
        show.stop()
        show.stop()

    out = shown(do, terminal=True)
    assert "1 of 4 trials done (1 stopped)  |  trial 1: step 32/32 val 2.5000" in out
