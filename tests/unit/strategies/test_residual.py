"""Rounds of a strategy with error feedback take no fresh memory as long as the model, once they have run."""

from typing import Any

import pytest
import torch
from torch import nn

from ray_lowcomm import strategies
from ray_lowcomm.core import memory
from ray_lowcomm.core.payload import Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from ray_lowcomm.core.tracks import PARAMS, Tracks

MODES: dict[str, dict[str, Any]] = {
    "model": {"name": "sparse_loco", "residual": "model", "chunk_size": 4, "topk": 3},
    "decaying": {"name": "sparse_loco", "residual": "model", "residual_decay": 0.9, "chunk_size": 4, "topk": 3},
    "buffer": {"name": "dct_momentum", "residual": "buffer", "chunk_size": 4, "topk": 3},
    "none": {"name": "diloco", "value_bits": 8},
    "model, late": {"name": "sparse_loco", "residual": "model", "chunk_size": 4, "topk": 3, "overlap_steps": 1},
    "none, late": {"name": "diloco", "value_bits": 8, "overlap_steps": 1, "mix": "keep"},
    "mixed": {"name": "diloco", "value_bits": 8, "overlap_steps": 1},
    "in parts": {"name": "topk_diloco", "inner_steps": 3, "chunk_size": 4, "topk": 3, "fragments": 3},
}


def _round(
    strategy: strategies.Strategy, step: int, *, track: str = PARAMS, commit: bool = True, late: int = 0, parts: int = 1
) -> None:
    fragment = step % parts if parts > 1 else None
    proposal = strategy.propose(SyncOp(track, launch=step, apply=step + late, fragment=fragment))
    received = Received((0,), (1.0,), (proposal.payload.data,))
    strategy.check(proposal.id, received)
    strategy.apply(proposal.id, received) if commit else strategy.discard(proposal.id)


def _run(fields: dict[str, Any], *, discards: bool, watch: Any = None) -> list[torch.Tensor]:
    """The model after each of six rounds, with one more attempt at each that is given up if `discards`."""
    torch.manual_seed(0)
    model = nn.Linear(12, 9)
    tracks = Tracks(model, torch.optim.SGD(model.parameters(), 0.1))
    strategy = strategies.build(strategies.resolve(StrategySettings(**fields)), tracks)
    after = []
    for step in range(6):
        tracks.add(torch.randn(tracks.layout.numel))
        rounds = {"late": fields.get("overlap_steps", 0), "parts": fields.get("fragments", 1)}
        if discards:
            _round(strategy, step, commit=False, **rounds)
        _round(strategy, step, **rounds)
        after.append(tracks.read(PARAMS))
        if watch is not None:
            watch()
    return after


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_only_the_first_round_takes_memory(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []
    made = memory.uninitialised
    monkeypatch.setattr(memory, "uninitialised", lambda like: taken.append(like) or made(like))
    counts: list[int] = []
    _run(fields, discards=False, watch=lambda: counts.append(len(taken)))
    assert counts == [1] * 6


def test_moments_take_what_parameters_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []
    made = memory.uninitialised
    monkeypatch.setattr(memory, "uninitialised", lambda like: taken.append(like) or made(like))
    model = nn.Linear(12, 9)
    tracks = Tracks(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    codec = {"default": TrackCodec(topk=3, chunk_size=4)}
    strategy = strategies.build(strategies.resolve(StrategySettings(name="desloc", codec=codec)), tracks)
    for step in range(1, 4):
        tracks.add(torch.randn(tracks.layout.numel))
        _round(strategy, step)
        _round(strategy, step, track="momentum_buffer")
    assert len(taken) == 1


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_attempts_that_were_given_up_leave_no_trace(fields: dict[str, Any]) -> None:
    with_discards = _run(fields, discards=True)
    assert all(torch.equal(a, b) for a, b in zip(_run(fields, discards=False), with_discards, strict=True))
