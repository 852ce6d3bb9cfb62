"""Whole runs whose messages are sent in shards: who comes and goes, what is counted, what is refused."""

import pytest
import torch
from torch import nn

from ray_lowcomm.core.codecs.shards import Ranges
from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.payload import Payload
from ray_lowcomm.core.settings import Fault, StrategySettings, TrackCodec
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.attempt import Attempt, sharded_bytes
from ray_lowcomm.transport.local import LocalLink
from tests.contract import fleet
from tests.contract.fleet import Job, strategy_of

from .local_run import Setup
from .test_local_fleet import assert_whole
from .test_resume import VARIANTS

SHARDED = VARIANTS["sharded"]
GATHERED = SHARDED | {"combine": "gather"}


def combiner(outcome, index=0):
    return strategy_of(outcome.replicas[index]).combiner


def shard_sizes(outcome, count):
    return [shard.size for shard in Ranges(combiner(outcome).codec).cut(count)]


# ---- who comes and goes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["inner", "exchange", "voted"])
def test_a_killed_owners_residual_is_lost_and_counted_and_all_else_is_handed_on(tmp_path, phase):
    """From 3 to 2 and back; who voted and then died has its sums in the round, and takes its residual with it."""
    outcome = Setup(str(tmp_path), SHARDED, faults=(Fault("kill", 1, 3, phase),), steps=20, every=0).go()
    assert_whole(outcome, rounds=5)
    members = [record["members"] for record in outcome.records]
    assert members[2] == ([0, 1, 2] if phase == "voted" else [0, 2])
    assert members[-1] == [0, 1, 2]
    summary, lost = outcome.summary, shard_sizes(outcome, 3)[1]
    assert summary["lost_residual"] == lost
    assert summary["rounds_retried"] == (phase == "exchange")
    said = [text for text in outcome.said("notice") if "residual are lost" in text]
    assert said == [
        f"round {3 + (phase == 'voted')}: {lost} numbers of the owners' residual are lost: nobody holds them now"
    ]
    held = [combiner(outcome, i).held for i in range(3)]
    assert [part.start for part in held[1:]] == [part.stop for part in held[:-1]]


def test_a_fleet_that_grows_and_shrinks_loses_only_what_leaves(tmp_path):
    """From 2 to 3, in the order of their coming, and to 2 again in order: a leaver takes its residual with it."""

    def look(coordinator, record):
        if record["round"] == 4:
            coordinator.leave(2, "its node goes away", coordinator.now)

    faults = (Fault("kill", 2, 1),)
    outcome = Setup(str(tmp_path), SHARDED, faults=faults, steps=28, every=0).go(on_record=look)
    assert not outcome.failure
    members = [record["members"] for record in outcome.records]
    assert (members[0], members[3], members[-1]) == ([0, 1], [0, 1, 2], [0, 1])
    assert outcome.summary["lost_residual"] == shard_sizes(outcome, 3)[2]


def test_going_on_with_another_number_hands_on_what_is_there(tmp_path):
    Setup(str(tmp_path), SHARDED, replicas=3, steps=8).go()
    fewer = Setup(str(tmp_path), SHARDED, replicas=2, steps=16).go(resume=True)
    assert_resumed(fewer, 2)
    assert fewer.summary["lost_residual"] == shard_sizes(fewer, 3)[2]
    more = Setup(str(tmp_path), SHARDED, replicas=4, steps=24).go(resume=True)
    assert_resumed(more, 4)
    assert more.summary["lost_residual"] == fewer.summary["lost_residual"]


def test_going_on_without_owners_counts_what_they_had_held_back(tmp_path):
    Setup(str(tmp_path), SHARDED, replicas=3, steps=8).go()
    gathered = Setup(str(tmp_path), SHARDED | {"combine": "gather"}, replicas=2, steps=16).go(resume=True)
    assert_resumed(gathered, 2)
    held = sum(shard_sizes(gathered, 3))
    assert gathered.summary["lost_residual"] == held
    assert [text for text in gathered.said("notice") if "residual are lost" in text] == [
        f"round 3: {held} numbers of the owners' residual are lost: nobody holds them now"
    ]
    again = Setup(str(tmp_path), SHARDED | {"combine": "gather"}, replicas=2, steps=24).go(resume=True)
    assert again.summary["lost_residual"] == held


TRACKS = {
    **{"name": "desloc", "param_period": 2, "exp_avg_period": 8, "exp_avg_sq_period": 8, "combine": "sharded"},
    "codec": {"params": TrackCodec(topk=2, chunk_size=4), "default": TrackCodec(topk=2, chunk_size=4)},
}


@pytest.mark.parametrize(
    ("faults", "stops"),
    [((), ()), ((Fault("kill", 0, 5),), ()), ((Fault("nan", 0, 6),), ()), ((), ("gather",)), ((), ("sharded",))],
)
def test_owners_are_remembered_until_each_track_has_been_sent_without_them(tmp_path, faults, stops):
    """Parameters go in round 5 of the resumed run, moments in round 8; joiners and checkpoints come in between."""
    Setup(str(tmp_path), TRACKS, replicas=2, steps=8).go()
    gathered = TRACKS | {"combine": "gather"}
    for combine in stops:
        between = Setup(str(tmp_path), gathered, replicas=2, steps=10).go(resume=True)
        assert 0 < between.summary["lost_residual"] < 3 * sum(shard_sizes_of("params", between))
        gathered = TRACKS | {"combine": combine}
    outcome = Setup(str(tmp_path), gathered, replicas=2, steps=24, faults=faults).go(resume=True)
    assert_resumed(outcome, 2)
    assert outcome.summary["lost_residual"] == 3 * sum(shard_sizes_of("params", outcome))


def shard_sizes_of(track, outcome):
    codec = strategy_of(outcome.replicas[0]).of(track).combiner.codec
    return [shard.size for shard in Ranges(codec).cut(2)]


def assert_resumed(outcome, replicas):
    assert not outcome.failure
    assert len(outcome.summary["state_digests"]) == replicas
    assert len(set(outcome.summary["state_digests"].values())) == 1


# ---- what is sent -----------------------------------------------------------------------------------------------


def test_the_download_of_sixteen_is_no_larger_than_the_upload(tmp_path):
    """A million parameters: shards of some 1,200 bytes, so that their headers weigh little."""
    job = Job(
        StrategySettings(name="sparse_loco", inner_steps=1, combine="sharded"),
        lambda: nn.Linear(1024, 1024, bias=False),
        replicas=16,
        steps=1,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batch=lambda replica, step: torch.randn(2, 1024, generator=torch.Generator().manual_seed(replica)),
        loss=lambda model, x: model(x).square().mean(),
    )
    outcome = fleet.run(job, tmp_path)
    assert outcome.failure is None
    assert len({digests[-1] for digests in outcome.shared.values()}) == 1
    up, down = outcome.summary["wire_bytes_up"], outcome.summary["wire_bytes_down"]
    message = combiner(outcome).codec.nbytes
    assert message == pytest.approx(0.149 * 2**20 / 8, rel=0.01)
    assert 1.875 * message < down <= 1.3 * up
    assert max(up, down) <= 2.0 * message


def test_bytes_are_those_that_went_through_the_transport(tmp_path, monkeypatch):
    moved = {i: dict.fromkeys(("out", "into", "messages", "sizes"), 0) for i in range(3)}
    real = LocalLink.perform

    def counting(link, plan, key, step):
        rank, at, parts = plan.rank(link.index), moved[link.index], step.parts
        at["out"] += sum(len(part) for i, part in enumerate(parts) if i != rank)
        at["messages"] += len(parts) - 1
        received = real(link, plan, key, step)
        at["into"] += sum(len(part) for i, part in enumerate(received) if i != rank)
        at["sizes"] += len(parts) - 1
        return received

    monkeypatch.setattr(LocalLink, "perform", counting)
    outcome = Setup(str(tmp_path), SHARDED, faults=(Fault("kill", 1, 2, "exchange"),), every=0).go()
    found = outcome.fleet.coordinator.book.totals.bytes
    state = {i: found[i]["wire_up"] - moved[i]["out"] - 8 * moved[i]["messages"] for i in range(3)}
    fetched = outcome.summary["state_transfer_bytes"] + outcome.summary["catch_up_bytes"]
    assert outcome.summary["state_transfer_bytes"] > 0
    assert state == {0: state[0], 1: 0, 2: fetched - state[0]}
    assert min(state[0], state[2]) > 0  # both donors give of it
    into = {i: found[i]["wire_down"] - moved[i]["into"] - 8 * moved[i]["sizes"] for i in range(3)}
    assert into == {0: 0, 1: fetched, 2: 0}
    assert {i: found[i]["down"] for i in range(3)} == {i: at["into"] for i, at in moved.items()}


def test_a_replica_alone_sends_nothing_and_trains(tmp_path):
    outcome = Setup(str(tmp_path), SHARDED, replicas=1, every=0).go()
    assert_whole(outcome, replicas=1)
    summary = outcome.summary
    assert [summary[k] for k in ("bytes_up", "bytes_down", "wire_bytes_up", "wire_bytes_down")] == [0, 0, 0, 0]
    assert summary["lost_residual"] == 0


def test_more_replicas_than_chunks(tmp_path):
    outcome = Setup(str(tmp_path), SHARDED | {"chunk_size": 64, "topk": 99}, replicas=6, steps=8, every=0).go()
    assert_whole(outcome, replicas=6, rounds=2)


def test_bytes_of_shards_by_hand():
    # rank 1: parts of 10 and 30 out, its sum of 20 twice; two parts of 20 and the sums of 10 and 30 in; 8 a size
    assert sharded_bytes((10, 20, 30), 1) == {"up": 60, "down": 80, "buffer": 0, "wire_up": 112, "wire_down": 112}
    assert set(sharded_bytes((10,), 0).values()) == {0}


@pytest.mark.slow
def test_it_learns_about_as_well_as_when_all_is_gathered(tmp_path):
    losses = {}
    for residual in ("buffer", "model"):
        for strategy in (SHARDED, GATHERED):
            setup = Setup(str(tmp_path), strategy | {"residual": residual}, replicas=4, steps=160, every=0)
            losses[residual, strategy["combine"]] = setup.go().records[-1]["loss"]
    for residual in ("buffer", "model"):
        assert losses[residual, "sharded"] < 1.1 * losses[residual, "gather"], losses


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1], ids=["parts", "sums"])
def test_a_damaged_part_is_sent_again_and_changes_nothing(tmp_path, monkeypatch, number):
    whole = Setup(str(tmp_path / "whole"), SHARDED, every=0).go()
    real, done = LocalLink.perform, []

    def damaging(link, plan, key, step):
        received = real(link, plan, key, step)
        if plan.round == 1 and link.index == 2 and key.endswith(f"/{number}") and not done:
            done.append(key)
            damaged = received[0].clone()
            damaged[40] ^= 4
            return (damaged, *received[1:])
        return received

    monkeypatch.setattr(LocalLink, "perform", damaging)
    outcome = Setup(str(tmp_path / "damaged"), SHARDED, every=0).go()
    assert done == [f"params@8/{number}"]
    assert_whole(outcome)
    (said,) = [text for text in outcome.said("notice") if "exchange failed" in text]
    assert "replica 2: message of replica 0: message of " in said
    assert "is damaged: its checksum differs" in said
    assert outcome.summary["rounds_retried"] == 1
    assert [outcome.state(i) for i in range(3)] == [whole.state(i) for i in range(3)]
    assert outcome.summary["state_digests"] == whole.summary["state_digests"]


class Broken:
    """A `Sharding` that gets bad parts, on a transport that remembers whether its group was left."""

    lost = 0
    closed = False

    def cut(self, seats):
        return [torch.zeros(3 + rank, dtype=torch.uint8) for rank in range(len(seats.members))]

    def combine(self, seats, parts):
        raise PayloadError("message of replica 5: nonsense")

    def perform(self, plan, key, step):
        return (torch.zeros(9, dtype=torch.uint8),) * len(step.parts)

    def close(self):
        self.closed = True


def test_who_gets_a_bad_part_leaves_the_group_so_that_nobody_waits():
    broken = Broken()
    plan = m.Plan(1, 0, (3, 5), (0.5, 0.5), {"op": (0, 0)}, 60.0)
    attempt = Attempt(broken, plan, 3, [("op", Payload("sharded", torch.empty(0, dtype=torch.uint8), broken))])
    with pytest.raises(PayloadError, match="message of replica 5: nonsense"):
        attempt.run()
    assert broken.closed
    assert attempt.bytes == {"up": 4, "down": 9, "buffer": 0, "wire_up": 12, "wire_down": 17}


def test_what_is_voted_on_are_the_sums(tmp_path):
    """Two owners that send different sums to different replicas would be found out by the votes."""
    real = LocalLink.perform
    seen = {}

    def noting(link, plan, key, step):
        received = real(link, plan, key, step)
        if key.endswith("/1"):
            seen.setdefault((plan.generation, key), set()).add(digest_tensors(received))
        return received

    patch = pytest.MonkeyPatch()
    patch.setattr(LocalLink, "perform", noting)
    with patch.context():
        assert_whole(Setup(str(tmp_path), SHARDED, every=0).go())
    patch.undo()
    assert len(seen) == 4
    assert all(len(digests) == 1 for digests in seen.values())
