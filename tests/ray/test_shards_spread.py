"""Replicas whose shards find room on several nodes only."""

import json
import subprocess
import sys

import pytest

from tests.ray.nodes import OwnCluster, wait_until

ARGV = [
    *("--model.args.layers", "1", "--model.args.width", "32", "--model.args.heads", "2"),
    *("--strategy.inner_steps", "2", "--inner.steps", "8", "--inner.batch_size", "4", "--run.eval_every", "0"),
    *("--fleet.replicas", "2", "--fleet.shards_per_replica", "2", "--fleet.resources_per_replica", '{"CPU": 2}'),
    *("--tracking.enabled", "false", "--run.name", "run"),
]


@pytest.fixture(scope="module")
def cluster():
    """Nodes of one and of three CPUs."""
    made = OwnCluster(cpus=1)
    try:
        made.add_node(cpus=3)
        yield made
    finally:
        made.close()


def start(cluster, folder, *argv):
    env = cluster.environment | {"RAY_ADDRESS": cluster.address}
    with (folder / "out").open("w") as out:
        arguments = ["--run.output_dir", str(folder), *ARGV, *argv]
        return subprocess.Popen([sys.executable, "-m", "jobs.train", *arguments], env=env, stdout=out, stderr=out)


@pytest.mark.slow
def test_one_of_two_replicas_is_on_two_nodes(cluster, tmp_path):
    job = start(cluster, tmp_path, "--fleet.replica_spread", "pack")

    def of_replicas():
        assert job.poll() is None, (tmp_path / "out").read_text()
        groups = [g for g in cluster.groups("CREATED") if g["name"].startswith("replica ")]
        return len(groups) == 2 and groups

    try:
        nodes = [set(group["bundles_to_node_id"].values()) for group in wait_until("groups of replicas", of_replicas)]
        assert sorted(map(len, nodes)) == [1, 2]
        assert job.wait(240) == 0, (tmp_path / "out").read_text()
    finally:
        job.kill()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["members_lost"]) == ("finished", 4, 0)
    assert len(summary["state_digests"]) == 2
    assert len(set(summary["state_digests"].values())) == 1
    assert "/" in summary["state_digests"]["0"]  # of two shards


@pytest.mark.slow
def test_where_each_replica_must_be_on_one_node_it_is_refused_in_a_line_that_says_what_to_do(cluster, tmp_path):
    job = start(cluster, tmp_path, "--fleet.replica_spread", "strict_pack")
    assert job.wait(240) == 1
    last = (tmp_path / "out").read_text().strip().splitlines()[-1]
    assert "fleet.replicas = 2: only 1 replicas of {'CPU': 2.0} fit on the cluster's 2 nodes" in last
    assert last.endswith("; or set fleet.replica_spread = pack: then a replica's shards may be on several nodes")
