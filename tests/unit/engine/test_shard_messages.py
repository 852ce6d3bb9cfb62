"""Requests of a replica's shards become one of the replica, and an answer says to each shard what is its own."""

from dataclasses import fields, replace

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.remarks import Counted, said
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.engine import answers
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.checked import malformed
from ray_lowcomm.engine.coordinator import HANDLERS
from ray_lowcomm.engine.shard_messages import ALONE, merged, parted

OP = SyncOp("params", 4, 4)
ARRIVAL = m.Arrival(0, 1, 3, True, 4, 8, 1.5, 0.1, (m.PayloadSize("params@4", "mean", 40),), "d", {0: 4})
VOTE = m.Vote(0, 1, 2, True, digest="d", bytes={"up": 4, "down": 6}, arrival=ARRIVAL)
MISSED = m.Missed(3, (OP,), (0, 1), (0.5, 0.5), "d")
SAMPLES = [
    m.Join(0, "d", {"a": "b"}, ("exp_avg",)),
    ARRIVAL,
    m.Paused(0, 1, 2),
    VOTE,
    m.Offer(1, 2, [object()]),
    m.Kept(1, MISSED, object()),
    m.Back(1, 2, 3, {0: 40}),
    m.CaughtUp(1, 2, {}),
    m.Evaluated(0, 1, None),
    m.Saved(0, 1, {"file": (40, "hash")}),
    m.Finished(0, None),
]


@pytest.mark.parametrize("request_", SAMPLES, ids=lambda request_: type(request_).__name__)
def test_of_one_shard_all_is_as_it_is(request_):
    assert merged([request_]) is request_


@pytest.mark.parametrize("request_", SAMPLES, ids=lambda request_: type(request_).__name__)
def test_what_is_merged_is_a_message_for_the_driver(request_):
    for shards in (2, 3):
        one = merged([request_] * shards)
        assert type(one) is type(request_)
        assert malformed(one, HANDLERS) == ""


def test_every_kind_of_request_is_merged_or_is_one_shards_alone():
    assert {type(one) for one in SAMPLES} | set(ALONE) == set(HANDLERS)


def test_shards_that_ask_for_different_things_are_refused():
    with pytest.raises(FleetError, match=r"\['Arrival', 'Paused'\]"):
        merged([ARRIVAL, m.Paused(0, 1, 3)])
    with pytest.raises(FleetError, match="Said"):
        merged([m.Said(0, "a"), m.Said(0, "b")])


def test_a_join_has_the_digests_and_settings_of_all_shards():
    config = {"run.seed": "0", "model.layout": "x", "model.dense_bytes": "10,20"}
    first = m.Join(1, "a", config, ("exp_avg", "exp_avg_sq"), ("r", "s"), 3, 1, "lost", holds="h")
    other = m.Join(1, "b", config | {"model.layout": "y"}, (), ("s", "t"), 3, 1, "lost", holds="i")
    one = merged([first, other])
    assert one == m.Join(
        1,
        "a/b",
        {"run.seed": "0", "model.layout": "x/y", "model.dense_bytes": "20,40"},
        ("exp_avg", "exp_avg_sq"),
        ("r", "s", "t"),
        3,
        1,
        "lost",
        holds="h/i",
    )
    assert merged([first, replace(other, holds=None)]).holds is None


def test_what_is_said_of_parameters_counts_those_of_all_shards():
    text = "{part} of {whole} parameters are sent whole, in chunks of {shapes}"
    remarks = Counted(text, 0, 2402), Counted(text, 69, 2403, ("8x3", "45"))
    one = merged([m.Join(0, "a", {}, remarks=(remark, "said by all")) for remark in remarks])
    assert malformed(one, HANDLERS) == ""
    assert said(one.remarks) == ("69 of 4,805 parameters are sent whole, in chunks of 8x3, 45", "said by all")


def test_bytes_of_parts_that_a_shard_has_not_count_once():
    joins = [m.Join(0, "a", {"model.dense_bytes": text}) for text in ("10,20", "5", "")]
    assert merged(joins).config == {"model.dense_bytes": "15,20"}


def test_places_in_the_data_are_those_of_all_shards():
    other = replace(ARRIVAL, positions={0: 9, 7: 3})
    assert merged([ARRIVAL, other]).positions == {0: 4, 7: 3}
    saved = [m.Saved(0, 1, {}, positions=positions) for positions in ({0: 4}, {7: 3}, {8: 5})]
    assert merged(saved).positions == {0: 4, 7: 3, 8: 5}


def test_an_arrival_is_healthy_if_all_shards_are():
    sizes = (m.PayloadSize("params@4", "mean", 30), m.PayloadSize("buffers@4", "first", 2))
    other = replace(ARRIVAL, tokens=5, loss=9.0, sizes=sizes, digest="e", residual_norm=4.0, positions={0: 9})
    one = merged([replace(ARRIVAL, residual_norm=3.0), other])
    assert one.healthy
    assert one.problem == ""
    assert (one.tokens, one.loss, one.positions, one.digest) == (13, 1.5, {0: 4}, "d/e")
    assert one.residual_norm == pytest.approx(5.0)
    assert one.sizes == (
        m.PayloadSize("params@4|0", "mean", 40),
        m.PayloadSize("params@4|1", "mean", 30),
        m.PayloadSize("buffers@4|1", "first", 2),
    )
    bad = merged([ARRIVAL, replace(other, healthy=False, problem="not finite", digest=None, residual_norm=None)])
    assert not bad.healthy
    assert (bad.problem, bad.digest, bad.residual_norm) == ("shard 1: not finite", None, None)
    hopeless = replace(ARRIVAL, healthy=False, problem="20 steps")
    assert merged([hopeless, hopeless]).problem == "20 steps"  # which all found together


def test_numbers_of_the_users_own_are_means_over_the_shards_that_have_them():
    given = {"all": 1.0, "some": 5.0}, {"all": 2.0}, {"all": 6.0, "some": 7.0, "last": 8.0}
    means = {"all": 3.0, "some": 6.0, "last": 8.0}
    assert merged([replace(ARRIVAL, metrics=one) for one in given]).metrics == means
    losses = None, 1.0, 4.0
    evaluated = [m.Evaluated(0, 1, loss, one) for loss, one in zip(losses, given, strict=True)]
    assert merged(evaluated) == m.Evaluated(0, 1, 2.5, means)
    assert merged([m.Evaluated(0, 1, None, {})] * 2) == m.Evaluated(0, 1, None, {})
    assert merged([m.Evaluated(0, 1, 0.1, {"accuracy": 0.7})] * 3) == m.Evaluated(0, 1, 0.1, {"accuracy": 0.7})


def test_a_vote_is_that_of_all_shards():
    first = replace(VOTE, exchange_s=1.0, wait_s=0.5, blocked_s=3.0, strays=2)
    other = replace(
        VOTE, ok=False, digest="", problem="cut", exchange_s=2.0, outer_s=4.0, residual_lost=7, bytes={"up": 1}
    )
    one = merged([first, other])
    assert (one.ok, one.digest, one.problem) == (False, "d/", "shard 1: cut")
    assert (one.exchange_s, one.wait_s, one.outer_s, one.blocked_s, one.strays) == (2.0, 0.5, 4.0, 3.0, 2)
    assert (one.bytes, one.residual_lost) == ({"up": 5, "down": 6}, 7)
    assert one.arrival == merged([ARRIVAL, ARRIVAL])
    assert merged([first, replace(other, arrival=None)]).arrival is None


def test_files_of_all_shards_are_saved_and_a_problem_names_its_shard():
    shards = [m.Saved(0, 4, {f"part.s{k}": (k, "h")}, tokens=k + 1, steps=2, folder="f") for k in range(3)]
    one = merged(shards)
    assert one.files == {"part.s0": (0, "h"), "part.s1": (1, "h"), "part.s2": (2, "h")}
    assert (one.problem, one.steps, one.tokens, one.folder) == ("", 2, 6, "f")
    shards[2] = replace(shards[2], problem="full")
    assert merged(shards).problem == "shard 2: full"


def test_a_state_offered_comes_to_each_shard_from_the_same_shard():
    """Through what the driver makes of offers: a mapping by member."""
    offers = [merged([m.Offer(k, 3, f"{k}.0", digest="a"), m.Offer(k, 3, f"{k}.1", digest="b")]) for k in range(2)]
    own = merged([m.Offer(2, 3, "2.0", "own 0", "a"), m.Offer(2, 3, "2.1", None, "b")])
    assert offers[0].own is None
    offered = m.Offered({one.member: one.state for one in (*offers, own)}, (2, own.own), own.digest)
    welcome = m.Welcome(1, 3, 12, 4, 16, 0, 0, {}, state=offered, history="h/i")
    parts = [parted(welcome, shard, 2) for shard in range(2)]
    assert [part.history for part in parts] == ["h", "i"]
    assert parts[0].state == m.Offered({0: "0.0", 1: "1.0", 2: "2.0"}, (2, "own 0"), "a")
    assert parts[1].state == m.Offered({0: "0.1", 1: "1.1", 2: "2.1"}, None, "b")


def test_what_was_missed_comes_to_each_shard_with_its_own_history():
    kept = merged([m.Kept(0, replace(MISSED, history=h), f"ref {h}") for h in ("a", "b")])
    missed = replace(kept.missed, sources={kept.member: kept.reference})
    answer = m.Return((missed,), 3, 12, 4, 16, 0, 0, "a/b")
    for shard, history in enumerate("ab"):
        part = parted(answer, shard, 2)
        assert part.history == history
        assert part.missed == (replace(MISSED, history=history, sources={0: f"ref {history}"}),)


def test_a_state_of_a_replica_with_other_shards_is_refused():
    welcome = m.Welcome(1, 3, 12, 4, 16, 0, 0, {}, state=m.Offered({0: ("a", "b", "c")}, None, ""))
    with pytest.raises(FleetError, match="a replica of 2 shards was offered the state of one of 3"):
        parted(welcome, 0, 2)


@pytest.mark.parametrize("history", ["", "abc", "a/b/c"])
def test_a_history_of_other_shards_is_everybodys_and_comes_back_as_it_was(history):
    """A run that begins, and one that is resumed with another number of shards."""
    welcome = m.Welcome(1, 3, 12, 4, 16, 0, 0, {}, history=history)
    held = [parted(welcome, shard, 2).history for shard in range(2)]
    assert held == [history] * 2
    assert merged([m.Join(0, "d", {}, holds=h) for h in held]).holds == history


def test_each_shard_exchanges_its_own_messages():
    arrivals = []
    for member in range(2):
        one = replace(ARRIVAL, member=member)
        other = replace(one, sizes=(m.PayloadSize("params@4", "mean", 30 + member),))
        arrivals.append(merged([one, other]))
    assert answers.different_messages(arrivals) == ""
    sizes = {s.op: tuple(a.sizes[k].nbytes for a in arrivals) for k, s in enumerate(arrivals[0].sizes)}
    plan = m.Plan(7, 3, (0, 1), (0.5, 0.5), sizes, 60.0)
    assert [parted(plan, shard, 2).sizes for shard in range(2)] == [{"params@4": (40, 40)}, {"params@4": (30, 31)}]


def test_shard_10_is_not_shard_0():
    plan = m.Plan(7, 3, (0,), (1.0,), {f"params@4|{k}": (k,) for k in range(11)}, 60.0)
    assert [parted(plan, k, 11).sizes for k in (0, 1, 10)] == [{"params@4": (k,)} for k in (0, 1, 10)]


@pytest.mark.parametrize("answer", [m.Commit(3, 4), m.Reset("why"), m.Stop("why"), m.Noted()])
def test_all_other_answers_are_everybodys(answer):
    assert parted(answer, 1, 2) is answer


def test_no_field_of_a_request_is_lost():
    """All that is set in each shard's request is set in the replica's."""
    for request in SAMPLES:
        one = merged([request, request])
        for field in fields(request):
            assert bool(getattr(request, field.name)) == bool(getattr(one, field.name)), field.name
