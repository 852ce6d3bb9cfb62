"""Nodes come and go under a run, on clusters of the tests' own; the runs are processes of their own."""

import json

import pytest

from tests.ray.elastic_run import ElasticRun
from tests.ray.nodes import OwnCluster, wait_until

HEAD_ID = "f" * 51 + "00000"  # the fake provider takes the head to have this id
LISTS = (
    "cluster_synced_files initialization_commands setup_commands head_setup_commands worker_setup_commands "
    "head_start_ray_commands worker_start_ray_commands rsync_exclude rsync_filter"
)


def autoscaling(address):
    """Up to two nodes of one CPU, which go after 12 s of idling; Ray's fake provider starts them as processes here."""
    none = {"node_config": {}, "max_workers": 0, "resources": {"CPU": 0}}
    node = {"node_config": {}, "min_workers": 0, "max_workers": 2}
    config = {
        "cluster_name": "growing",
        "max_workers": 2,
        "idle_timeout_minutes": 0.2,
        "upscaling_speed": 10,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "disable_node_updaters": True,
            "use_node_id_as_ip": True,  # all nodes have the same
        },
        "auth": {"ssh_user": "nobody"},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": none,
            "worker": node | {"resources": {"CPU": 1, "object_store_memory": 80_000_000}},
        },
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
    }
    return json.dumps(config | {name: [] for name in LISTS.split()})


@pytest.fixture
def by_hand():
    """A cluster whose nodes are added by hand; the first has one CPU."""
    cluster = OwnCluster()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def start(tmp_path):
    runs = []

    def start_run(cluster, **fleet):
        runs.append(ElasticRun(cluster, tmp_path, **fleet))
        return runs[-1]

    yield start_run
    for run in runs:
        run.close()


def until(run, what, condition):
    """Wait for it, as long as the run lasts."""
    wait_until(what, lambda: condition() or run.process.poll() is not None)
    assert run.process.poll() is None, run.output


def nothing_is_held(cluster):
    return not cluster.groups("PENDING", "CREATED", "RESCHEDULING", "PREPARED")


@pytest.mark.timeout(900)
def test_a_replica_joins_on_a_new_node_and_leaves_one_that_is_drained(by_hand, start):
    first = by_hand.add_node()
    run = start(by_hand, replicas=[1, 2])
    until(run, "the first round", lambda: run.members)
    assert run.members[0] == [0]
    assert len(by_hand.groups("PENDING")) == 1  # what an autoscaler would see
    second = by_hand.add_node()
    until(run, "the second replica", lambda: run.members[-1] == [0, 1])
    second.kill_worker()
    until(run, "a round without it", lambda: run.members[-1] == [0])
    until(run, "its return in the same place", lambda: run.members[-1] == [0, 1])
    by_hand.drain(first.id)
    until(run, "the first one's leaving", lambda: run.members[-1] == [1])
    wait_until("the drained node's end", lambda: first.id not in by_hand.alive())  # once it is idle
    until(run, "a place for the first one", lambda: by_hand.groups("PENDING"))
    summary = run.end()
    notices = run.told("notice")
    assert summary["status"] == "finished"
    assert (summary["replicas"], summary["replicas_joined"], summary["replicas_left"]) == (2, 2, 1), notices
    assert summary["members_lost"] == 1, notices  # the one that was killed
    assert list(summary["state_digests"]) == ["1"]
    shapes = [members for k, members in enumerate(run.members) if k == 0 or members != run.members[k - 1]]
    assert shapes == [[0], [0, 1], [0], [0, 1], [1]]
    assert any("replica 0 leaves after this round: its node is being drained" in text for text in notices)
    assert "Traceback" not in run.output
    assert nothing_is_held(by_hand)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_when_the_last_node_is_drained_the_run_goes_on_with_the_next(start):
    cluster = OwnCluster()
    try:
        only = cluster.add_node()
        run = start(cluster, replicas=[1, 2])
        until(run, "some rounds", lambda: len(run.members) > 5)
        cluster.drain(only.id)
        wait_until("the drained node's end", lambda: only.id not in cluster.alive())
        rounds = len(run.members)
        cluster.add_node()
        until(run, "more rounds", lambda: len(run.members) > rounds + 5)
        summary = run.end()
        assert (summary["replicas_left"], summary["members_lost"], summary["lost_inner_steps"]) == (1, 0, 0)
        numbers = [record["round"] for record in run.told("round")]
        assert numbers == list(range(1, 601))  # none is lost, none is done twice
        assert f"no replica was left: goes on from round {rounds}" in run.told("notice")
    finally:
        run.close()
        cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_fixed_fleet_goes_on_when_one_of_its_nodes_dies(by_hand, start):
    here = by_hand.alive()
    nodes = [by_hand.add_node() for _ in range(2 - sum(cpus == 1 for cpus in here.values()))]
    run = start(by_hand, replicas=2)
    until(run, "the first round", lambda: run.members)
    nodes[-1].kill_raylet()
    until(run, "a round without its replica", lambda: len(run.members[-1]) == 1)
    summary = run.end()
    notices = run.told("notice")
    (survivor,) = run.members[-1]
    assert summary["status"] == "finished"
    assert summary["members_lost"] == 1, notices
    assert list(summary["state_digests"]) == [str(survivor)]
    assert sum(f"replica {1 - survivor} is lost" in text for text in notices) == 1
    assert "Traceback" not in run.output
    assert nothing_is_held(by_hand)


@pytest.fixture
def growing():
    """A head without CPUs, and an autoscaler."""
    fake = {"RAY_FAKE_CLUSTER": "1", "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
    cluster = OwnCluster(autoscaling, AUTOSCALER_UPDATE_INTERVAL_S="1", **fake)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_a_head_without_cpus_and_back(growing, start):
    """The autoscaler starts nodes for the fleet, the run outlives one of them, and all go away at the end."""
    assert list(growing.alive().values()) == [0]
    run = start(growing, replicas=[1, 3])
    until(run, "the first round", lambda: run.members)
    until(run, "the second replica", lambda: len(run.members[-1]) == 2)
    assert len(growing.alive()) == 3
    assert len(growing.groups("PENDING")) == 1  # the third finds no place: the cluster has two nodes at most
    growing.kill_raylet_of(max(growing.alive()))
    until(run, "a round without its replica", lambda: len(run.members[-1]) == 1)
    rounds = len(run.members)
    until(run, "more rounds", lambda: len(run.members) > rounds + 20)
    summary = run.end()
    assert summary["status"] == "finished"
    assert summary["replicas"] == 2
    assert (summary["members_lost"], summary["replicas_left"]) == (1, 0), run.told("notice")
    assert len(summary["state_digests"]) == 1
    assert "the autoscaler is asked for the rest" in run.told("notice")[0]
    assert "Traceback" not in run.output
    assert nothing_is_held(growing)
    wait_until("the end of the idle nodes", lambda: list(growing.alive()) == [HEAD_ID])
