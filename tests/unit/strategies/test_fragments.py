"""Parameters that go in fragments: against a loop by hand, resumed with other ones, what is kept and what is lost."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ray_lowcomm import strategies
from ray_lowcomm.core.errors import CheckpointError, SettingError
from ray_lowcomm.core.fragments import cut
from ray_lowcomm.core.layout import Layout
from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from ray_lowcomm.engine.checkpoint import Source, load_member, save_tensors
from ray_lowcomm.engine.storage import Storage
from tests.contract.bench import Member, conclude, exchange, member, members, play_round, propose, train_to_launch
from tests.contract.cases import DCT, TILES, Case, momentum
from tests.contract.fleet import formula
from tests.contract.models import fill

from . import reference as ref
from .test_overlap import ETA, MU, compare, engine

PARTS = (slice(0, 35), slice(35, ref.SIZE))  # the first matrix has about a half of all


@pytest.mark.parametrize("mix", [None, "keep"])
def test_streaming_diloco_is_each_fragment_at_its_own_time(tmp_path, mix: str | None, monkeypatch) -> None:
    """Fragment p: launched after (p + 1) H/2 steps and every H then, applied τ later, θ_p ← α θ_p + (1 − α) θ_p new."""
    h, tau, alpha = 4, 1, 0.5
    monkeypatch.setattr("tests.unit.strategies.test_overlap.H", h)
    world, outers = ref.World(2), [ref.Nesterov(ETA, MU) for _ in PARTS]
    for outer, at in zip(outers, PARTS, strict=True):
        outer.m = outer.m[at]
    steps, open_one = 4 * h, None
    for step in range(1, steps + 1):
        world.train(1)
        for p, at in enumerate(PARTS):
            if step % h == (p + 1) * h // 2 % h:
                open_one = p, at, [own[at].copy() for own in world.own]
        last = step == steps
        if open_one is not None and (last or step % (h // 2) == tau):
            p, at, launch = open_one
            open_one = None
            _apply(world, outers[p], at, launch, None if last else mix or alpha)
            if last:  # all fragments are synchronised at the end
                _apply(world, outers[0], PARTS[0], [own[PARTS[0]].copy() for own in world.own], None)
            world.note()
    settings = StrategySettings(
        name="diloco", inner_steps=h, fragments=2, overlap_steps=tau, outer_lr=ETA, outer_momentum=MU, mix=mix
    )
    compare(engine(tmp_path, settings), world.path)


def _apply(world: ref.World, outer: ref.Nesterov, at: slice, launch: list[np.ndarray], mix: float | str | None) -> None:
    mean = sum(world.anchor[at] - own for own in launch) / len(launch)
    world.anchor = world.anchor.copy()
    world.anchor[at] = outer.step(world.anchor[at], mean)
    for own, then in zip(world.own, launch, strict=True):
        if mix is None:
            own[at] = world.anchor[at]
        elif mix == "keep":
            own[at] = world.anchor[at] - (then - own[at])
        else:
            own[at] = mix * own[at] + (1 - mix) * world.anchor[at]


def _model() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 2)))


def _fleet(settings: StrategySettings, count: int = 2) -> list[Member]:
    return [member(Case("x", settings), i, _model()) for i in range(count)]


def _play(fleet: list[Member], rounds: int) -> None:
    for _ in range(rounds):
        play_round(fleet)


def _restored(fleet: list[Member], settings: StrategySettings) -> list[Member]:
    fresh = _fleet(settings, len(fleet))
    for one, old in zip(fresh, fleet, strict=True):
        one.state.load(*old.saved())
        one.step = old.step
    return fresh


H4: dict[str, Any] = {"inner_steps": 4}
RESUMED = {
    "diloco": StrategySettings(name="diloco", **H4),
    "diloco_2_bit": StrategySettings(name="diloco", value_bits=2, **H4),
    "topk": StrategySettings(name="topk_diloco", **TILES | H4),
    "dct_buffer": StrategySettings(name="dct_momentum", residual="buffer", **DCT | H4),
    "sparse_loco": StrategySettings(name="sparse_loco", **TILES | H4),
    "local_sgd": StrategySettings(name="local_sgd", **H4),
    "local_adam": StrategySettings(name="local_adam", **H4),
    "desloc": StrategySettings(name="desloc", param_period=4, outer_optimizer="nesterov"),
}


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])  # and back
def test_a_run_goes_on_with_other_fragments_by_parameter(name: str, before: int, after: int) -> None:
    """Anchor, outer momentum and residual are where they were; with the same fragments again all is bit-identical."""
    settings = RESUMED[name]
    first, other = replace(settings, fragments=before), replace(settings, fragments=after, overlap_steps=1)
    fleet = _fleet(first)
    _play(fleet, 2 * before)
    resumed = _restored(fleet, other)
    for one, old in zip(resumed, fleet, strict=True):
        assert torch.equal(one.strategy.shared_parameters(), old.strategy.shared_parameters())
        for mine, theirs in (
            (one.strategy.shared_state(), old.strategy.shared_state()),
            (one.strategy.local_state(), old.strategy.local_state()),
        ):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], value) for key, value in theirs.items())
    again = _restored(resumed, first)
    assert [one.snapshot() for one in again] == [one.snapshot() for one in fleet]
    assert [one.strategy.digest() for one in again] == [one.strategy.digest() for one in fleet]
    _play(resumed, 2 * after)
    assert len({one.strategy.digest() for one in resumed}) == 1


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("combine", ["sharded", "gather"])
def test_what_owners_held_of_other_fragments_is_lost_and_counted(before: int, after: int, combine: str) -> None:
    settings = StrategySettings(name="topk_diloco", combine="sharded", **TILES | H4)
    fleet = _fleet(replace(settings, fragments=before))
    _play(fleet, 2 * before)
    held = [one.strategy.local_state() for one in fleet]
    numel = fleet[0].tracks.layout.numel
    assert sum(state[name].numel() for state in held for name in state if name.endswith("values")) == numel
    resumed = _restored(fleet, replace(settings, fragments=after, combine=combine))
    assert not any(one.strategy.local_state() for one in resumed)
    lost = [0, 0]
    for _ in range(2 * after):
        ops = train_to_launch(resumed)
        proposals = [propose(one, ops) for one in resumed]
        received = exchange(proposals)
        for i, ((proposal,), one) in enumerate(zip(proposals, resumed, strict=True)):
            sharding = proposal.payload.sharding
            lost[i] += sharding.lost if sharding else proposal.payload.residual_lost
            conclude(one, [proposal], received)
    assert lost == [numel, numel] if combine == "gather" else sum(lost) == numel


@pytest.mark.parametrize("parts", [1, 2])
def test_buffers_of_coefficients_keep_their_mean_where_fewer_replicas_go_on(parts: int, tmp_path) -> None:
    settings = StrategySettings(name="dct_momentum", residual="buffer", fragments=parts, **DCT | H4)
    fleet = _fleet(settings, 3)
    _play(fleet, 2 * parts)
    held = [one.strategy.local_state() for one in fleet]
    assert all(name.startswith("residual_dct/") for name in held[0])
    assert fleet[0].strategy.unshared == ("residual_dct/",)
    storage, files = Storage(str(tmp_path)), {}
    files["shared.safetensors"] = save_tensors(storage, "c/shared.safetensors", fleet[0].state.shared())
    for i, one in enumerate(fleet):
        files[f"replica_000{i}.safetensors"] = save_tensors(storage, f"c/replica_000{i}.safetensors", one.state.local())
    source = Source(storage, "c", {"members": [0, 1, 2], "files": files})
    kept = _fleet(replace(settings, fragments=3 - parts), 2)
    for i, one in enumerate(kept):
        shared, local = load_member(source, i, [0, 1], one.state.unshared)
        one.state.load(shared, local or {})
    for name in held[0]:
        before = sum(state[name] for state in held) / 3
        after = sum(one.strategy.local_state()[name] for one in kept) / 2
        assert bool(before.any())
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def test_owners_of_the_same_fragments_go_on_with_what_they_held() -> None:
    settings = StrategySettings(name="topk_diloco", combine="sharded", fragments=2, **TILES | H4)
    fleet = _fleet(settings)
    _play(fleet, 4)
    resumed = _restored(fleet, settings)
    for play in (fleet, resumed):
        _play(play, 3)
    assert [one.snapshot() for one in resumed] == [one.snapshot() for one in fleet]
    names = set(fleet[0].strategy.local_state())
    assert {f"owner_residual/{p}of2/{what}" for p in (0, 1) for what in ("values", "chunks", "plan")} == names


def test_a_checkpoint_of_another_model_names_the_parameter() -> None:
    settings = StrategySettings(name="diloco", inner_steps=4, fragments=2)
    one = _fleet(settings, 1)[0]
    shared = one.strategy.shared_state() | {"anchor/0.weight": torch.ones(3, 3)}
    with pytest.raises(CheckpointError, match=r"anchor.* does not fit.*0\.weight"):
        one.strategy.load(shared, None)


def test_only_the_digest_of_what_has_changed_is_made_again(monkeypatch) -> None:
    fleet = _fleet(StrategySettings(name="diloco", inner_steps=4, fragments=4))
    one, read = fleet[0], []
    for number in range(4):
        part = one.strategy.of("params", number)
        digest = part.digest
        monkeypatch.setattr(part, "digest", lambda digest=digest, number=number: read.append(number) or digest())
    whole = one.strategy.digest()
    assert (one.strategy.digest(), read) == (whole, [0, 1, 2, 3])
    play_round(fleet)
    assert one.strategy.digest() != whole
    assert read == [0, 1, 2, 3, 0]
    one.strategy.load(one.strategy.shared_state(), None)
    one.strategy.digest()
    assert len(read) == 9


def test_a_round_moves_its_own_fragment_only_and_sends_its_bytes() -> None:
    fleet = _fleet(StrategySettings(name="diloco", inner_steps=4, fragments=4))
    fragments = strategies.fragments_of(strategies.resolve(RESUMED["diloco"]), fleet[0].tracks.layout)
    assert fragments == ()
    settings = strategies.resolve(StrategySettings(name="diloco", inner_steps=4, fragments=4))
    fragments = strategies.fragments_of(settings, fleet[0].tracks.layout)
    sizes = strategies.dense_bytes(settings, fleet[0].tracks.layout)
    assert sum(sizes) == fleet[0].tracks.layout.nbytes
    for number in (0, 1, 2, 3, 0):
        before = [one.strategy.shared_parameters() for one in fleet]
        (op,) = ops = train_to_launch(fleet)
        assert op.fragment == number
        proposals = [propose(one, ops) for one in fleet]
        assert proposals[0][0].payload.nbytes == sizes[number]
        own = [one.tracks.read("params") for one in fleet]
        for one, mine in zip(fleet, proposals, strict=True):
            conclude(one, mine, exchange(proposals))
        for one, shared, then in zip(fleet, before, own, strict=True):
            moved, own_moved = one.strategy.shared_parameters() != shared, one.tracks.read("params") != then
            for fragment in fragments:
                for at in fragment.slices:
                    assert bool(moved[at].any()) == bool(own_moved[at].any()) == (fragment.index == number)


def test_dense_bytes_of_a_whole_are_those_of_the_layout() -> None:
    layout = Layout(("a", "b"), ((100, 4), (100,)))
    assert strategies.dense_bytes(strategies.resolve(StrategySettings(name="ddp")), layout) == (2000,)
    settings = strategies.resolve(StrategySettings(name="desloc", fragments=2))
    assert strategies.dense_bytes(settings, layout) == tuple(f.layout.nbytes for f in cut(layout, 2)) == (992, 1008)


@pytest.mark.parametrize(
    "settings",
    [
        StrategySettings(name="topk_diloco", chunk_size=4, topk=4, fragments=3, inner_steps=3),
        StrategySettings(name="topk_diloco", chunk_size=8, topk=4, fragments=2, inner_steps=2),
        StrategySettings(
            name="desloc", codec={"params": TrackCodec(topk=4, chunk_size=8)}, fragments=3, param_period=3
        ),
    ],
)
def test_tiles_of_a_codec_stay_the_same_in_fragments(settings: StrategySettings) -> None:
    side = settings.chunk_size or 8
    for fragment in strategies.fragments_of(strategies.resolve(settings), Layout(("a",), ((64, 4),))):
        assert all((piece.start or 0) % side == 0 for piece in fragment.pieces)


def test_a_low_precision_parameter_that_is_cut_keeps_its_master() -> None:
    def made() -> nn.Module:
        model = nn.Linear(6, 12, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(formula(3)(72).view(12, 6))
        return model

    settings = StrategySettings(
        name="diloco", inner_steps=2, fragments=2, outer_optimizer="sgd", outer_lr=1e-4, outer_momentum=0.0
    )
    fleet = [member(Case("x", settings, momentum), i, made()) for i in range(2)]
    for number in range(4):
        ops = (replace(train_to_launch_of(fleet, number), launch=number, apply=number),)
        anchors = fleet[0].strategy.shared_parameters()
        at = slice(0, 36) if number % 2 == 0 else slice(36, 72)
        mean = sum(one.tracks.read("params")[at] for one in fleet) / 2
        proposals = [propose(one, ops) for one in fleet]
        for one, mine in zip(fleet, proposals, strict=True):
            conclude(one, mine, exchange(proposals))
            wanted = anchors[at] - 1e-4 * (anchors[at] - mean)
            torch.testing.assert_close(one.strategy.shared_parameters()[at], wanted, rtol=1e-6, atol=1e-7)
            assert torch.equal(one.tracks.read("params")[at], one.strategy.shared_parameters()[at])


def train_to_launch_of(fleet: list[Member], number: int) -> Any:
    """Move bf16 parameters a little, and give the op of the next fragment."""
    with torch.no_grad():
        for one in fleet:
            for parameter in one.tracks.parameters.values():
                parameter.add_(2**-6 * (one.index + 1))
    return fleet[0].schedule.ops(number + 1)[0]


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"name": "diloco", "inner_steps": 8, "fragments": 3},
        r"fragments = 3: .*8: take 2 or 4, or a period of 6 or 9",
    ),
    ({"name": "diloco", "inner_steps": 8, "fragments": 2, "overlap_steps": 5}, r"inner_steps / strategy.fragments = 4"),
    ({"name": "diloco", "fragment_order": "strided"}, r"fragment_order = .strided.: needs strategy.fragments of 2"),
    (
        {"name": "desloc", "periods": "random", "fragments": 2},
        r"fragments = 2: needs strategy.periods: fixed",
    ),
    ({"name": "ddp", "fragments": 2}, r"strategy\.fragments = 2: is not used by ddp"),
    ({"name": "dct_momentum", "variant": "paper", "fragments": 2}, r"fragments = 2: is not used by strategy.variant"),
]


@pytest.mark.parametrize(("fields", "text"), BAD, ids=str)
def test_fragments_that_make_no_sense_are_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        strategies.resolve(StrategySettings(**fields))


def test_fragments_that_the_model_does_not_make_are_refused_where_it_is_known() -> None:
    settings = strategies.resolve(StrategySettings(inner_steps=64, fragments=64))
    with pytest.raises(SettingError, match=r"strategy\.fragments = 64: must be at most 4"):
        strategies.build(settings, members(Case("x", StrategySettings(name="ddp")), 1)[0].tracks)


def test_a_remark_is_made_once_not_for_each_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    one = member(Case("x", StrategySettings(name="sparse_loco", inner_steps=4, fragments=2)))
    (counted,) = one.strategy.remarks()
    assert counted.whole == one.tracks.layout.numel
    assert counted.part == sum(part.remarks()[0].part for part in one.strategy.parts.values()) > 0
    assert str(counted).startswith(
        f"params: {counted.part:,} of {counted.whole:,} parameters are sent whole, in chunks of"
    )
    for part in one.strategy.parts.values():
        monkeypatch.setattr(part, "remarks", lambda: ("a text",))
    assert one.strategy.remarks() == ("params, fragment 0 of 2: a text",)
