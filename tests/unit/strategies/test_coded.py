"""DES-LOC with coded tracks: what is sent, what stays, and what a second moment can never become."""

import pytest
import torch

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.remarks import said
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from tests.contract.bench import Member, conclude, exchange, join, member, members, play_round, propose, train_to_launch
from tests.contract.cases import Case, adopt, momentum
from tests.contract.fleet import adamw

ALL = TrackCodec(topk=16, chunk_size=4, value_bits=32)  # all entries of a tile, as they are
FEW = TrackCodec(topk=2, chunk_size=4, value_bits=1)


def _case(codec: dict[str, TrackCodec], optimizer=adamw, **fields) -> Case:
    periods = {"param_period": 2, "exp_avg_period": 2, "exp_avg_sq_period": 2}
    return Case("x", StrategySettings(name="desloc", codec=codec, **periods | fields), optimizer)


def _play_round(fleet: list[Member], track: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One round; returns what all had in a track before it, and what all read of the messages (dense: all)."""
    ops = train_to_launch(fleet)
    before = [one.tracks.read(track) for one in fleet]
    proposals = [propose(one, ops) for one in fleet]
    received = exchange(proposals)
    for one, mine in zip(fleet, proposals, strict=True):
        conclude(one, mine, received)
    at = [op.track for op in ops].index(track)
    if proposals[0][at].payload.combine == "mean":
        return before, [-x for x in before]
    codec = fleet[0].strategy.of(track).codec
    return before, [codec.decode_mean([codec.parse(message)], [1.0]) for message in received[at].parts]


@pytest.mark.parametrize("optimizer", [adamw, momentum, adopt])
@pytest.mark.parametrize("outer", ["none", "nesterov"])
def test_a_codec_that_loses_nothing_is_dense_desloc(outer: str, optimizer) -> None:
    fields = {"outer_optimizer": outer} | ({"exp_avg_period": 10**6} if optimizer is adamw else {})  # that is bounded
    dense, coded = (_case(codec, optimizer, **fields) for codec in ({}, {"default": ALL}))
    fleet, twins = members(coded, 3), members(dense, 3)
    tracks = ("params", *fleet[0].tracks.moments.names)
    assert len(tracks) == (2 if optimizer is momentum else 3)
    for _ in range(3):
        play_round(fleet)
        play_round(twins)
        for one, twin in zip(fleet, twins, strict=True):
            for track in tracks:
                torch.testing.assert_close(one.tracks.read(track), twin.tracks.read(track), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduce", ["replicas", "senders"])
@pytest.mark.parametrize("residual", ["model", "buffer"])
def test_coded_parameters_alone_are_sparse_loco_to_the_bit(residual: str, reduce: str) -> None:
    never = {"exp_avg_period": 10**6, "exp_avg_sq_period": 10**6}
    outer = {"outer_optimizer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.7}
    coded = _case({"params": TrackCodec(topk=3, chunk_size=4, residual=residual, reduce=reduce)}, **never, **outer)
    fields = {"inner_steps": 2, "topk": 3, "chunk_size": 4, "residual": residual, "reduce": reduce} | outer
    fleet, twins = members(coded, 3), members(Case("y", StrategySettings(name="sparse_loco", **fields)), 3)
    for _ in range(4):
        play_round(fleet)
        play_round(twins)
    for one, twin in zip(fleet, twins, strict=True):
        assert torch.equal(one.tracks.read("params"), twin.tracks.read("params"))
        assert torch.equal(one.strategy.shared_parameters(), twin.strategy.shared_parameters())


@pytest.mark.parametrize("transform", ["none", "dct"])
def test_a_moment_takes_the_mean_message_and_keeps_what_it_did_not_send(transform) -> None:
    """The copy: s ← s − mean m ; x_r ← x_r + m_r − mean m, with m_r read from the messages."""
    codec = TrackCodec(topk=3, chunk_size=4, transform=transform, value_bits=4)
    fleet = members(_case({"momentum_buffer": codec}, momentum), 3)
    copy = torch.zeros(fleet[0].tracks.layout.numel)
    for _ in range(3):
        before, sent = _play_round(fleet, "momentum_buffer")
        mean = torch.stack(sent).mean(0)
        copy -= mean
        for one, x, m in zip(fleet, before, sent, strict=True):
            torch.testing.assert_close(one.tracks.read("momentum_buffer"), x + m - mean, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(_copy(one, "momentum_buffer"), copy, rtol=1e-5, atol=1e-7)
    assert copy.count_nonzero() > 0


def test_what_a_moment_did_not_send_goes_out_later() -> None:
    """With moments that stand still, replicas meet at their mean although each message holds two of 16 entries."""
    fleet = members(_case({"momentum_buffer": TrackCodec(topk=2, chunk_size=4, value_bits=32)}, momentum), 2)
    train_to_launch(fleet)
    mean = torch.stack([one.tracks.read("momentum_buffer") for one in fleet]).mean(0)
    apart = (fleet[0].tracks.read("momentum_buffer") - mean).norm()
    for turn in range(8):
        proposals = [[one.strategy.propose(SyncOp("momentum_buffer", turn, turn))] for one in fleet]
        for one, mine in zip(fleet, proposals, strict=True):
            conclude(one, mine, exchange(proposals))
    for one in fleet:
        assert (one.tracks.read("momentum_buffer") - mean).norm() < 1e-5 * apart
        torch.testing.assert_close(_copy(one, "momentum_buffer"), mean, rtol=1e-4, atol=1e-6)


def test_second_moments_are_never_less_than_a_replicas_share_of_the_mean() -> None:
    """One bit for values of all sizes: without the bound small ones would go below zero."""
    fleet = members(_case({"exp_avg_sq": FEW}), 3)
    negative = 0
    for _ in range(4):
        before, sent = _play_round(fleet, "exp_avg_sq")
        for one, x, m in zip(fleet, before, sent, strict=True):
            unbounded = x + m - torch.stack(sent).mean(0)
            negative += int((unbounded < 0).sum())
            torch.testing.assert_close(one.tracks.read("exp_avg_sq"), torch.maximum(unbounded, x / 3))
    assert negative > 0


@pytest.mark.parametrize("codec", [{"exp_avg": FEW}, {"exp_avg": ALL}, {"params": FEW}], ids=["few", "all", "dense"])
def test_a_first_moment_grows_no_further_than_to_a_step_of_the_learning_rate(codec: dict[str, TrackCodec]) -> None:
    fleet = members(_case(codec, exp_avg_sq_period=10**6), 3)
    beta1, beta2 = fleet[0].tracks.optimizers.param_groups[0]["betas"]
    bounded = 0
    for step in (2, 4, 6):
        before, sent = _play_round(fleet, "exp_avg")
        for one, x, m in zip(fleet, before, sent, strict=True):
            free = x + m - torch.stack(sent).mean(0)
            rms = (one.tracks.read("exp_avg_sq") / (1 - beta2**step)).sqrt() * (1 - beta1**step)
            most = torch.maximum(rms, x.abs())
            bounded += int((free.abs() > most).sum())
            expected = free.sign() * torch.minimum(free.abs(), most)
            torch.testing.assert_close(one.tracks.read("exp_avg"), expected, rtol=1e-4, atol=1e-7)
    assert bounded > 0


def test_a_joiner_takes_the_moments_of_its_donor_and_the_shared_copies() -> None:
    case = _case({"default": FEW})
    fleet = members(case, 2)
    for _ in range(2):
        play_round(fleet)
    joiner = member(case, 2)
    join(joiner, fleet[0])
    for track in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(joiner.tracks.read(track), fleet[0].tracks.read(track))
        assert torch.equal(_copy(joiner, track), _copy(fleet[0], track))
        assert not torch.equal(_copy(joiner, track), joiner.tracks.read(track))
    assert joiner.strategy.digest() == fleet[0].strategy.digest()


def test_state_of_a_run_without_codecs_can_be_gone_on_from() -> None:
    dense, coded = member(_case({})), member(_case({"default": FEW}))
    play_round([dense])
    coded.state.load(*dense.saved())
    assert torch.equal(coded.strategy.shared_parameters(), dense.strategy.shared_parameters())
    assert not _copy(coded, "exp_avg").any()


def test_each_track_is_sent_as_its_codec_says() -> None:
    """Named, not named, and named in order to be left alone."""
    one = member(_case({"default": FEW, "exp_avg": TrackCodec()}))
    kinds = {op.track: proposal.payload.combine for op, proposal in _proposed(one)}
    assert kinds == {"params": "gather", "exp_avg": "mean", "exp_avg_sq": "gather"}
    one = member(_case({"exp_avg_sq": FEW}))
    kinds = {op.track: proposal.payload.combine for op, proposal in _proposed(one)}
    assert kinds == {"params": "mean", "exp_avg": "mean", "exp_avg_sq": "gather"}


def test_remarks_name_the_track() -> None:
    whole = TrackCodec(topk=6, chunk_size=4, value_bits=1)  # eight bits of indices cost more than the other signs
    (remark,) = said(member(_case({"exp_avg": whole})).strategy.remarks())
    assert remark.startswith("exp_avg: ")


def test_the_residual_of_parameters_can_be_in_a_buffer() -> None:
    one = member(_case({"params": TrackCodec(topk=2, chunk_size=4, residual="buffer"), "exp_avg": FEW}))
    play_round([one])
    residual = torch.cat([value.view(-1) for value in one.strategy.local_state().values()])
    assert residual.any()
    assert torch.equal(one.tracks.read("params"), one.strategy.shared_parameters())
    assert member(_case({"params": FEW})).strategy.local_state() == {}


def test_a_track_that_the_optimizer_does_not_have_is_refused() -> None:
    with pytest.raises(SettingError, match=r"codec\.exp_avg = .* no such track; with SGD there are params, mom"):
        member(_case({"exp_avg": FEW}, momentum))


def _proposed(one: Member):
    ops = train_to_launch([one])
    return zip(ops, propose(one, ops), strict=True)


def _copy(one: Member, track: str) -> torch.Tensor:
    """The shared copy of a moment."""
    return one.strategy.of(track).shared_parameters()
