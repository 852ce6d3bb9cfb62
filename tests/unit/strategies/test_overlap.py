"""Rounds that are applied late, against loops written by hand in float64, through the engine with two replicas."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_lowcomm.core.payload import Payload
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.engine.buffers import BufferSync
from tests.contract.bench import conclude, exchange, member, members, propose, train_meanwhile, train_to_launch
from tests.contract.cases import Case
from tests.contract.fleet import Job, run, strategy_of
from tests.contract.models import HalfPrecision, fill

from . import reference as ref

W, H, ROUNDS, ETA, MU = 2, 5, 4, 0.7, 0.6


def engine(tmp_path: Any, settings: StrategySettings) -> list[tuple[np.ndarray, np.ndarray]]:
    """(anchor of replica 0, own parameters of all) after each step."""
    anchors: dict[int, list[np.ndarray]] = {i: [] for i in range(W)}
    own: dict[int, list[np.ndarray]] = {i: [] for i in range(W)}

    def watch(index: int, replica, model) -> None:
        anchors[index].append(strategy_of(replica).shared_parameters().numpy().copy())
        own[index].append(model.flat().detach().numpy().copy())

    job = Job(settings, ref.Quadratic, W, H * ROUNDS, ref.sgd, ref.batch, ref.loss, watch=watch)
    assert run(job, tmp_path).failure is None
    np.testing.assert_array_equal(anchors[0], anchors[1])
    return list(zip(anchors[0], np.stack(list(own.values()), 1), strict=True))


def compare(got: list[tuple[np.ndarray, np.ndarray]], expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
    assert len(got) == len(expected) == H * ROUNDS
    for (anchor, own), (want_anchor, want_own) in zip(got, expected, strict=True):
        np.testing.assert_allclose(anchor, want_anchor, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(own, want_own, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("overlap", [1, 2, 4])
@pytest.mark.parametrize("mix", ["keep", None, 0.0, 0.3, 1.0])
def test_dense_diloco_keeps_its_steps_or_mixes_them(tmp_path, overlap: int, mix: float | str | None) -> None:
    """θ_r ← θ_new − (θ_r at launch − θ_r now), or α θ_r now + (1 − α) θ_new."""
    world, outer = ref.World(W), ref.Nesterov(ETA, MU)
    for number in range(ROUNDS):
        world.train(H - world.steps % H)
        launch = [own.copy() for own in world.own]
        last = number == ROUNDS - 1
        if not last:
            world.train(overlap)
        mean = sum(world.anchor - own for own in launch) / W
        world.anchor = outer.step(world.anchor, mean)
        for r in range(W):
            if last:  # the run ends here, so it is applied at once
                world.own[r] = world.anchor.copy()
            elif mix == "keep":
                world.own[r] = world.anchor - (launch[r] - world.own[r])
            else:
                alpha = 0.5 if mix is None else mix
                world.own[r] = alpha * world.own[r] + (1 - alpha) * world.anchor
        world.note()
    settings = StrategySettings(
        name="diloco", inner_steps=H, overlap_steps=overlap, outer_lr=ETA, outer_momentum=MU, mix=mix
    )
    compare(engine(tmp_path, settings), world.path)


def test_what_does_not_fit_stays_in_the_buffer_beside_late_rounds(tmp_path) -> None:
    """With a = decay e + Δ ; q = top-k ; e ← a − q ; θ ← outer(θ, mean q) ; θ_r ← θ − (θ_r at launch − θ_r now)."""
    world, outer, compress, overlap = ref.World(W), ref.Nesterov(ETA, MU), ref.tiles(4, 3), 3
    for number in range(ROUNDS):
        world.train(H - world.steps % H)
        launch = [own.copy() for own in world.own]
        total = [0.9 * e + world.anchor - own for e, own in zip(world.residual, world.own, strict=True)]
        messages = [compress.encode(a) for a in total]
        world.residual = [a - compress.decode(m) for a, m in zip(total, messages, strict=True)]
        if number < ROUNDS - 1:
            world.train(overlap)
        world.anchor = outer.step(world.anchor, compress.decode(ref.mean_over_replicas(messages)))
        world.own = [world.anchor - (a - b) for a, b in zip(launch, world.own, strict=True)]
        world.note()
    tiles = {"inner_steps": H, "chunk_size": 4, "topk": 3, "value_bits": 32, "reduce": "replicas"}
    outer_step = {"outer_lr": ETA, "outer_momentum": MU, "residual": "buffer", "residual_decay": 0.9}
    compare(
        engine(tmp_path, StrategySettings(name="dct_momentum", overlap_steps=overlap, **tiles, **outer_step)),
        world.path,
    )


def test_moments_keep_their_steps_and_second_ones_stay_non_negative() -> None:
    settings = StrategySettings(name="local_adam", inner_steps=3, overlap_steps=3)
    fleet = members(Case("local_adam", settings), 2)
    ops = train_to_launch(fleet)
    tracks = [op.track for op in ops]
    launch = {t: [one.tracks.read(t) for one in fleet] for t in tracks}
    proposals = [propose(one, ops) for one in fleet]
    for one in fleet:
        train_meanwhile(one)
    one, now = fleet[1], {t: fleet[1].tracks.read(t) for t in tracks}
    one.tracks.write("exp_avg_sq", (mostly_gone := launch["exp_avg_sq"][1] * 1e-3))
    conclude(one, proposals[1], exchange(proposals))
    change = {t: sum(launch[t]) / 2 - launch[t][1] for t in tracks}
    torch.testing.assert_close(one.tracks.read("params"), now["params"] + change["params"])
    first, wanted = one.tracks.read("exp_avg"), now["exp_avg"] + change["exp_avg"]
    held = (first - wanted).abs() > 1e-7
    assert not held.all()
    assert bool((first.abs() <= wanted.abs() + 1e-7)[held].all())  # within its bound, and never beyond what is wanted
    second, wanted = one.tracks.read("exp_avg_sq"), mostly_gone + change["exp_avg_sq"]
    assert bool((wanted < 0).any())
    torch.testing.assert_close(second, torch.maximum(wanted, mostly_gone / 2))


def test_parameters_of_low_precision_keep_the_steps_of_their_masters() -> None:
    """What an outer step adds is far below what bf16 shows, and inner steps are bf16's own."""
    settings = StrategySettings(
        name="diloco",
        inner_steps=2,
        overlap_steps=2,
        outer_optimizer="sgd",
        outer_lr=1e-4,
        outer_momentum=0.0,
        mix="keep",
    )
    fleet = [member(Case("diloco", settings), i, fill(HalfPrecision())) for i in range(2)]
    ops = train_to_launch(fleet)
    anchor, launch = fleet[0].strategy.shared_parameters().clone(), [one.tracks.read("params") for one in fleet]
    proposals = [propose(one, ops) for one in fleet]
    for i, one in enumerate(fleet):
        train_meanwhile(one)
        now = one.tracks.read("params")
        conclude(one, proposals[i], exchange(proposals))
        moved = anchor - 1e-4 * (anchor - sum(launch) / 2)
        wanted = moved - (launch[i] - now)
        torch.testing.assert_close(one.tracks.read("params"), wanted, rtol=1e-6, atol=1e-7)
        first = one.tracks.parameters["inner.weight"]
        assert first.dtype == torch.bfloat16
        assert torch.equal(first, wanted[: first.numel()].view_as(first).to(torch.bfloat16))


@pytest.mark.parametrize("apply", [1, 2])
def test_buffers_that_are_sent_beside_inner_steps_are_those_of_the_launch(apply: int) -> None:
    model = nn.BatchNorm1d(3)
    sync = BufferSync(model, "average")
    ops = sync.ops(1, apply, "after_step")
    payloads: list[Payload] = [sync.propose(op).payload for op in ops]
    before = [payload.data.clone() for payload in payloads]
    model(torch.full((4, 3), 9.0))
    payloads[0].data.fill_(float("nan"))
    for payload in payloads:
        payload.restore()
    assert [torch.equal(p.data, b) for p, b in zip(payloads, before, strict=True)] == [apply == 2, True]


def test_a_blocking_round_takes_no_copy_of_the_parameters() -> None:
    one = member(Case("diloco", StrategySettings(name="diloco")))
    assert one.strategy.anchor.at_launch(SyncOp("params", 4, 4)) is None
    launch = one.strategy.anchor.at_launch(SyncOp("params", 4, 5))
    assert torch.equal(launch, one.tracks.read("params"))
