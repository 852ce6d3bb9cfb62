"""Runs in which replicas hang and die, done once more by hand: the engine has made nothing else of what was sent."""

from typing import Any

import pytest

from ray_lowcomm import strategies
from ray_lowcomm.core.fault import Fault, Kind, Phase
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.transport.local import LocalFleet

from .replay import Replay
from .tape import Taping, taped_build, tapes

H, STEP_S = 4, 2.0
TOPK: dict[str, Any] = {"name": "topk_diloco", "inner_steps": H, "chunk_size": 4, "topk": 3}
STRATEGIES: dict[str, dict[str, Any]] = {
    "topk": TOPK,
    "topk_overlap": TOPK | {"overlap_steps": 2},
    "topk_overlap_all": TOPK | {"overlap_steps": H},
    "topk_fragments": TOPK | {"fragments": 2, "overlap_steps": 1},
    "diloco_fragments": {"name": "diloco", "inner_steps": H, "fragments": 2, "overlap_steps": 2},
    "local_sgd": {"name": "local_sgd", "inner_steps": H},
    "sharded": TOPK | {"name": "dct_momentum", "combine": "sharded"},
    "stochastic": TOPK | {"name": "dct_momentum", "value_bits": 4, "rounding": "stochastic"},
    "sparse_buffer": TOPK | {"name": "sparse_loco"},
    "desloc": {"name": "desloc", "param_period": H, "exp_avg_period": H, "exp_avg_sq_period": 2 * H},
}
SLOW = ("topk_overlap_all", "local_sgd", "stochastic", "sparse_buffer", "topk", "topk_overlap")
every_strategy = pytest.mark.parametrize(
    "strategy",
    [pytest.param(given, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, given in STRATEGIES.items()],
)
PHASES: tuple[Phase, ...] = ("inner", "launched", "exchange", "voted", "ready")
APART = 6  # rounds from a fault to the next


def faults_of(kind: Kind, apart: int) -> tuple[Fault, ...]:
    """One in each phase, of all replicas in turn."""
    return tuple(Fault(kind, i % 3, 2 + i * apart, phase, seconds=26.0) for i, phase in enumerate(PHASES))


def played(
    directory: Any, given: dict[str, Any], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> tuple[Replay, dict[str, Any]]:
    """A run with such faults, done once more, and its summary."""
    monkeypatch.setattr(strategies, "build", taped_build)
    settings, records = strategies.resolve(StrategySettings(**given)), list[dict[str, Any]]()
    parts = given.get("fragments", 1)
    faults = faults_of(kind, APART * parts)
    steps = H // parts * (faults[-1].round + APART * parts)
    run, checkpoint = RunSettings(eval_every=0), CheckpointSettings(every=0)
    fleet = FleetSettings(replicas=3, transport="local", deadline_s=15.0)
    local = LocalFleet(
        RunPlan(run, checkpoint, settings, fleet, steps, str(directory)),
        RunSpec(settings, steps, str(directory), run, checkpoint, fleet, faults),
        lambda event: records.append(event.data) if event.kind == "record" else None,
    )
    local.run(Taping(str(directory), lambda context, replica: context.host.sleep(STEP_S)))
    assert local.coordinator.failure is None
    assert local.coordinator.book.fired == set(range(len(faults)))
    monkeypatch.undo()
    replay = Replay(settings, tapes(str(directory)), records)
    replay.run()
    return replay, local.coordinator.summary()


@every_strategy
def test_who_hangs_and_comes_back_holds_what_was_sent(
    tmp_path: Any, strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, summary = played(tmp_path, strategy, "hang", monkeypatch)
    assert replay.digests() == summary["state_digests"]
    assert replay.did("follow") >= summary["caught_up_rounds"] > 0


@every_strategy
def test_who_dies_and_is_back_holds_what_was_sent(
    tmp_path: Any, strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, summary = played(tmp_path, strategy, "kill", monkeypatch)
    assert replay.digests() == summary["state_digests"]
    assert replay.did("begin") == len(PHASES)


def test_a_replay_notices_a_step_that_was_not_shared(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replay, _ = played(tmp_path, STRATEGIES["topk"], "hang", monkeypatch)
    found = tapes(str(tmp_path))
    follows = next(i for i, line in enumerate(found[1][1]) if line["do"] == "follow")
    member, lines = found[1]
    step = next(i for i in range(follows, len(lines)) if lines[i]["do"] == "step")
    found[1] = member, lines[:step] + lines[step + 1 :]
    with pytest.raises(AssertionError, match=f"replica {member}, line"):
        Replay(replay.settings, found, replay.records).run()
