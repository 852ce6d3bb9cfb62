"""DCT momentum against the independent implementation, step by step, through the engine with three replicas."""

from typing import Any

import numpy as np
import pytest
import torch

from ray_lowcomm.core.settings import StrategySettings
from tests.contract.fleet import Job, run, strategy_of

from . import reference as ref

W, H, ROUNDS, CHUNK, TOPK = 3, 3, 5, 4, 3
ETA, MU = 0.7, 0.6


def _engine(tmp_path, **fields: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """(anchor of replica 0, own parameters of all) after each step."""
    anchors: dict[int, list[torch.Tensor]] = {i: [] for i in range(W)}
    own: dict[int, list[torch.Tensor]] = {i: [] for i in range(W)}

    def watch(index: int, replica, model) -> None:
        anchors[index].append(strategy_of(replica).shared_parameters().clone())
        own[index].append(model.flat().detach().clone())

    tiles = {"inner_steps": H, "chunk_size": CHUNK, "topk": TOPK, "value_bits": 32}
    if fields.get("variant") != "paper":
        tiles["reduce"] = "replicas"
    settings = StrategySettings(name="dct_momentum", **(tiles | fields))
    job = Job(settings, ref.Quadratic, W, H * ROUNDS, ref.sgd, ref.batch, ref.loss, watch=watch)
    assert run(job, tmp_path).failure is None
    if fields.get("variant") == "paper":
        return [(torch.stack(a).numpy(), torch.stack(o).numpy()) for a, o in _by_step(anchors, own)]
    assert all(torch.equal(a, b) for i in (1, 2) for a, b in zip(anchors[0], anchors[i], strict=True))
    return [(a[0].numpy(), torch.stack(o).numpy()) for a, o in _by_step(anchors, own)]


def _by_step(*traces: dict[int, list[torch.Tensor]]):
    return zip(*([*zip(*trace.values(), strict=True)] for trace in traces), strict=True)


def _compare(got, expected) -> None:
    assert len(got) == len(expected) == H * ROUNDS
    for (anchor, own), (want_anchor, want_own) in zip(got, expected, strict=True):
        np.testing.assert_allclose(anchor, want_anchor, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(own, want_own, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("decay", [1.0, 0.8])
@pytest.mark.parametrize("reduce", ["replicas", "senders"])
def test_residual_in_the_model_follows_b4a(tmp_path, decay: float, reduce: str) -> None:
    """With d = θ − θ_r ; m_r = decode(encode(d)) ; θ ← outer(θ, mean m) ; θ_r ← θ_new − decay (d − m_r)."""
    world, outer, compress = ref.World(W), ref.Nesterov(ETA, MU), ref.tiles(CHUNK, TOPK)
    mean = ref.mean_over_senders if reduce == "senders" else ref.mean_over_replicas
    for _ in range(ROUNDS):
        world.train(H)
        unshared = [world.anchor - own for own in world.own]
        messages = [compress.encode(d) for d in unshared]
        world.anchor = outer.step(world.anchor, compress.decode(mean(messages)))
        for r in range(W):
            world.own[r] = world.anchor - decay * (unshared[r] - compress.decode(messages[r]))
        world.note()
    fields = {"outer_lr": ETA, "outer_momentum": MU, "residual_decay": decay, "reduce": reduce}
    _compare(_engine(tmp_path, **fields), world.path)


def test_residual_in_a_buffer_follows_b4(tmp_path) -> None:
    """With a = decay e + Δ ; q = top-k ; e ← a − q ; θ ← outer(θ, mean q) ; all go on from θ."""
    world, outer, compress = ref.World(W), ref.Nesterov(ETA, MU), ref.tiles(CHUNK, TOPK)
    for _ in range(ROUNDS):
        world.train(H)
        total = [0.9 * e + world.anchor - own for e, own in zip(world.residual, world.own, strict=True)]
        messages = [compress.encode(a) for a in total]
        world.residual = [a - compress.decode(m) for a, m in zip(total, messages, strict=True)]
        world.anchor = outer.step(world.anchor, compress.decode(ref.mean_over_replicas(messages)))
        world.own = [world.anchor.copy() for _ in range(W)]
        world.note()
    fields = {"outer_lr": ETA, "outer_momentum": MU, "residual": "buffer", "residual_decay": 0.9}
    _compare(_engine(tmp_path, **fields), world.path)


def test_a_late_message_is_added_to_whatever_was_trained_meanwhile(tmp_path) -> None:
    """θ_r ← θ_r + m_r + (θ_new − θ), applied two inner steps after the launch (at the end of the run at once)."""
    overlap = 2
    world, outer, compress = ref.World(W), ref.Nesterov(ETA, MU), ref.tiles(CHUNK, TOPK)
    for number in range(ROUNDS):
        world.train(H - world.steps % H)
        messages = [compress.encode(world.anchor - own) for own in world.own]
        if number < ROUNDS - 1:
            world.train(overlap)
        moved = outer.step(world.anchor, compress.decode(ref.mean_over_replicas(messages)))
        for r in range(W):
            world.own[r] = world.own[r] + compress.decode(messages[r]) + (moved - world.anchor)
        world.anchor = moved
        world.note()
    _compare(_engine(tmp_path, outer_lr=ETA, outer_momentum=MU, overlap_steps=overlap), world.path)


def test_paper_variant_follows_b2_literally_and_its_replicas_drift_apart(tmp_path) -> None:
    world, compress = ref.World(W), ref.divisors(CHUNK, TOPK)
    anchors, momentum = [ref.start() for _ in range(W)], [np.zeros(ref.SIZE) for _ in range(W)]
    for _ in range(ROUNDS):
        world.train(H)
        delta = [anchors[r] - world.own[r] for r in range(W)]  # step 1
        momentum = [MU * momentum[r] + delta[r] for r in range(W)]  # step 2
        messages = [compress.encode(m) for m in momentum]  # steps 3 and 4
        momentum = [m - compress.decode(q) for m, q in zip(momentum, messages, strict=True)]  # step 5
        shared = compress.decode(ref.mean_over_senders(messages))  # step 6
        momentum = [m + shared for m in momentum]  # step 7
        anchors = [anchors[r] - ETA * (delta[r] + MU * momentum[r]) for r in range(W)]  # step 8
        world.own = [anchor.copy() for anchor in anchors]
        world.note()
    got = _engine(tmp_path, variant="paper", outer_lr=ETA, outer_momentum=MU)
    own = [(o, o) for _, o in got]
    _compare(own, [(o, o) for _, o in world.path])
    after_one_round = got[H - 1][0]
    assert np.linalg.norm(after_one_round[0] - after_one_round[1]) > 0.1


def test_mean_of_replicas_is_what_averaging_would_give_with_a_plain_outer_step(tmp_path) -> None:
    """η = 1, no momentum: compression only delays agreement (B4a)."""
    got = _engine(tmp_path, outer_optimizer="none")
    world = ref.World(W)
    for _ in range(ROUNDS):
        world.train(H)
    # each replica's training pulls on its own parameters, so only the first round can be compared with plain averaging
    _, own = got[H - 1]
    np.testing.assert_allclose(own.mean(0), world.path[H - 1][1].mean(0), rtol=1e-9)


def test_proposal_tells_how_far_the_replica_will_stay_from_the_anchor(tmp_path) -> None:
    def spread(residual: str) -> tuple[list[float], list[float]]:
        fields = {"inner_steps": H, "chunk_size": CHUNK, "topk": TOPK, "residual": residual}
        distances: dict[int, list[float]] = {i: [] for i in range(W)}

        def watch(index: int, replica, model) -> None:
            if replica.step_number % H == 0:
                away = strategy_of(replica).shared_parameters() - model.flat().detach()
                distances[index].append(float(away.norm()))

        settings = StrategySettings(name="dct_momentum", **fields)
        job = Job(settings, ref.Quadratic, W, 2 * H, ref.sgd, ref.batch, ref.loss, watch=watch)
        records = run(job, tmp_path).records
        rms = [float(np.sqrt(np.mean(np.square(d)))) for d in zip(*distances.values(), strict=True)]
        return [record["spread"] for record in records], rms

    told, measured = spread("model")
    assert told == pytest.approx(measured)
    assert min(told) > 0
    assert spread("buffer") == ([0.0, 0.0], [0.0, 0.0])
