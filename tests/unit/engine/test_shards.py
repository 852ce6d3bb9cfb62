"""Replicas of several processes that shard one model: what a replica of one process does."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.unit.engine.shards import ShardedRun, cut_alone, run

STRATEGIES = {
    "local_sgd": {"name": "local_sgd", "inner_steps": 4},
    "local_adam": {"name": "local_adam", "inner_steps": 4},
    "diloco": {"name": "diloco", "inner_steps": 4},
    "overlapped": {"name": "diloco", "inner_steps": 4, "overlap_steps": 2},
    "ddp": {"name": "ddp"},
}
CASES = {f"{name}-{cut}": {"strategy": STRATEGIES[name], "cut": cut} for name in STRATEGIES for cut in (True, False)}
CASES["three replicas"] = {"strategy": STRATEGIES["diloco"], "replicas": 3}
CASES["a bad batch"] = {"strategy": STRATEGIES["diloco"], "bad": (1, 6)}
CASES["weights given"] = {"strategy": STRATEGIES["diloco"], "given": True}
# chunks are cut where shards end, so other entries are the largest of theirs
TOPK = {"name": "topk_diloco", "inner_steps": 4, "chunk_size": 8, "topk": 32, "value_bits": 32}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By case: (of a replica of one process, by shard of one of two)."""
    folder = tmp_path_factory.mktemp("shards")
    cases = {**CASES, "topk": {"strategy": TOPK, "replicas": 3}}
    setups = {
        name: ShardedRun(f"{folder}/{name}", steps=12, every=0, **({"replicas": 2} | case))
        for name, case in cases.items()
    }
    one = run(setups, folder / "one")
    two = run({name: replace(setup, shards=2) for name, setup in setups.items()}, folder / "two")
    return {name: (one[name][0], two[name]) for name in setups}


@pytest.mark.parametrize("case", CASES)
def test_two_shards_learn_what_one_process_does(case, outcomes):
    one, two = outcomes[case]
    assert not one["failure"]
    for shard in two:
        assert not shard["failure"]
        assert len(set(shard["digests"].values())) == 1
        assert None not in shard["digests"].values()
        for index, parameters in one["parameters"].items():
            for parameter, value in parameters.items():
                torch.testing.assert_close(shard["parameters"][index][parameter], value, rtol=1e-4, atol=1e-6)
    mean = [sum(pair) / 2 for pair in zip(two[0]["losses"][0], two[1]["losses"][0], strict=True)]
    assert mean == pytest.approx(one["losses"][0], rel=1e-4)
    assert [r["loss"] for r in two[0]["records"]] == pytest.approx([r["loss"] for r in one["records"]], rel=1e-4)
    assert two[0]["summary"]["val_loss"] == pytest.approx(one["summary"]["val_loss"], rel=1e-4)


def test_a_batch_that_is_bad_on_one_shard_is_skipped_on_all(outcomes):
    one, two = outcomes["a bad batch"]
    assert [shard["summary"]["skipped_steps"] for shard in (one, *two)] == [1, 1, 1]


def test_compressed_messages_of_shards_learn_about_the_same(outcomes):
    one, two = outcomes["topk"]
    assert [r["loss"] for r in two[0]["records"]] == pytest.approx([r["loss"] for r in one["records"]], rel=0.01)
    sent = sum(shard["summary"]["bytes_up"] for shard in two)
    for shard in two:
        assert shard["summary"]["bytes_up"] == pytest.approx(sent / 2, rel=0.2)


def test_fsdp2_in_one_process(tmp_path):
    setup = ShardedRun(str(tmp_path), STRATEGIES["diloco"], replicas=2, steps=8, every=0)
    try:
        plain, cut = (run({"x": s}, tmp_path / str(s.cut))["x"][0] for s in (setup, cut_alone(setup)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert cut["losses"][0] == pytest.approx(plain["losses"][0], rel=1e-4)
    for name, value in plain["parameters"][1].items():
        torch.testing.assert_close(cut["parameters"][1][name], value, rtol=1e-4, atol=1e-6)
