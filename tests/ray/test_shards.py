"""Replicas of two processes each, on Ray: they train as one, and die as one."""

from functools import partial

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import Fault
from tests.ray.shard_fleets import die_the_second_time, fit, gone_within, pids, wait_for_the_death_of

ROUNDS = 12
LONG = 40  # in which a replica comes back, also on a machine that is busy


@pytest.mark.slow  # of test_shards_equal_local one case is daily
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_two_replicas_of_two_shards_train_as_one(cut, ray_cluster, tmp_path):
    notes, folder = fit(tmp_path, ROUNDS, cut=cut)
    summary = notes.summary
    assert summary["status"] == "finished"
    assert summary["rounds"] == ROUNDS
    assert summary["metrics"] == {"shard_number": 0.5}
    assert len(set(summary["state_digests"].values())) == 1
    assert len(summary["state_digests"]) == 2
    assert [len(pids(folder, replica)) for replica in range(2)] == [2, 2]
    assert gone_within([pid for replica in range(2) for pid in pids(folder, replica)], 10.0) == []


EVERY_DAY = ((1, "inner"),)
COMMITTED = ("voted", "ready", "checkpoint")
KILLS = [
    pytest.param(shard, phase, marks=() if (shard, phase) in EVERY_DAY else pytest.mark.slow)
    for shard in (0, 1)
    for phase in ("inner", "launched", "exchange", "voted", "ready", "checkpoint")
]


@pytest.mark.parametrize(("shard", "phase"), KILLS)
def test_a_shard_that_is_killed_takes_its_replica_with_it(shard, phase, ray_cluster, tmp_path):
    every = int(phase == "checkpoint")
    notes, folder = fit(tmp_path, LONG, (Fault("kill", 1, 4, phase, shard=shard),), every=every)
    summary = notes.summary
    assert summary["status"] == "finished"
    assert summary["members_lost"] == 1, notes.notices
    assert notes.left == []
    print(f"gone within {notes.took_s:.1f} s", *notes.notices, sep="\n  ")
    process = f"process {pids(folder, 1, shard)[0]}"
    gone = (
        f"its shard 1 is gone: {process} was killed, or has crashed: ActorDiedError" if shard else f"{process} is gone"
    )
    assert any(f"replica 1 is lost ({gone}" in text for text in notes.notices), notes.notices
    assert [len(pids(folder, *one)) for one in ((0,), (1, 0), (1, 1))] == [2, 2, 2]
    assert len(set(summary["state_digests"].values())) == 1
    assert len(summary["state_digests"]) == 2
    assert notes.records[-1]["members"] == [0, 1]
    assert notes.records[3]["members"] == ([0, 1] if phase in COMMITTED else [0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_is_killed_while_its_replica_gives_its_state_to_a_joiner(shard, ray_cluster, tmp_path):
    """Replica 1 comes back; replica 0, one of two that have the state for it, dies before any of it was fetched (which
    may still be had of Ray for a moment)."""
    faults = (Fault("kill", 1, 4), Fault("kill", 0, 5, "serving", shard=shard))
    loading = partial(wait_for_the_death_of, replica=0, joiner=1)
    notes, folder = fit(tmp_path, LONG, faults, replicas=3, watch=(0, 0), width=4096, loading=loading)
    print(f"gone within {notes.took_s:.1f} s", *notes.notices, sep="\n  ")
    assert notes.left == []
    assert_ended_whole(notes, folder, {0: 2, 1: 2, 2: 1})
    assert notes.summary["members_lost"] == 2
    assert any("replica 1 joins with a state from replicas " in text for text in notes.notices)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shard", [0, 1])
def test_a_shard_that_dies_while_its_replica_loads_the_state(shard, ray_cluster, tmp_path):
    loading = partial(die_the_second_time, replica=1, shard=shard)
    notes, folder = fit(tmp_path, LONG, (Fault("kill", 1, 4),), watch=(1, 1), loading=loading)
    print(f"gone within {notes.took_s:.1f} s", *notes.notices, sep="\n  ")
    assert notes.left == []
    assert_ended_whole(notes, folder, {0: 1, 1: 3})
    assert [replica for replica, lines in notes.output if "last words of the shard" in lines] == [
        f"1.{shard}" if shard else 1
    ]


@pytest.mark.slow
def test_a_shard_that_fails_to_export_ends_the_run_for_all_of_them_and_is_named(ray_cluster, tmp_path):
    """Nobody waits for it up to `hang_s`."""
    with pytest.raises(FleetError, match="replica 0: shard 1: ValueError: no such format"):
        fit(tmp_path, 2, hang_s=3600, fails_in_export=1)
    folder = tmp_path / "processes"
    assert gone_within([pid for replica in range(2) for pid in pids(folder, replica)], 30.0) == []


def assert_ended_whole(notes, folder, lives):
    """All replicas are there at the end, with equal states; `lives`: of how many processes each shard has been."""
    summary = notes.summary
    assert summary["status"] == "finished"
    assert len(set(summary["state_digests"].values())) == 1
    assert len(summary["state_digests"]) == len(lives)
    assert notes.records[-1]["members"] == sorted(lives)
    found = {replica: [len(pids(folder, replica, shard)) for shard in range(2)] for replica in lives}
    assert found == {replica: [count, count] for replica, count in lives.items()}
