"""A run of sharded replicas goes on from its checkpoint with as many shards, with more and with fewer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ray_lowcomm.engine.checkpoint import whole_checkpoints, whole_manifest
from ray_lowcomm.engine.manifest import CHECKSUM, store_manifest
from ray_lowcomm.engine.storage import Storage
from tests.unit.engine.shards import ShardedRun, run

STRATEGIES = {
    "diloco": ({"name": "diloco", "inner_steps": 4}, "adamw", True),
    "whole": ({"name": "local_adam", "inner_steps": 4}, "adamw", False),
    "topk": ({"name": "topk_diloco", "inner_steps": 4, "chunk_size": 4, "topk": 4}, "adamw", True),
}
PAIRS = [(2, 2), (2, 1), (1, 2), (2, 4)]
# with other shards the chunks of topk's parts are others, and so is what it sends
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
CASES = [
    (name, *pair)
    for name in STRATEGIES
    for pair in PAIRS
    if name == "diloco" or (pair[1] < 4 and name != "topk") or pair == (2, 2)
]


def unite(directory, shards):
    """What the shards of one fleet would have written to one folder: they have one each here."""
    target = Storage(str(directory / "united"))
    for name in whole_checkpoints(Storage(f"{directory}/{shards}/0")):
        folder, files = f"checkpoints/{name}", {}
        for shard in range(shards):
            part = Path(f"{directory}/{shards}/{shard}/{folder}")
            shutil.copytree(part, directory / "united" / folder, dirs_exist_ok=True)
            manifest = json.loads((part / "manifest.json").read_text())
            files |= manifest["files"]
        del manifest[CHECKSUM]
        store_manifest(target, folder, manifest | {"files": files})
        assert whole_manifest(target, folder).get("shards", 1) == shards
    return directory / "united" / "checkpoints"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """By number of shards and strategy: straight runs, and the checkpoints of those that were killed; their setups."""
    top = tmp_path_factory.mktemp("runs")
    setups = {
        name: ShardedRun(f"{top}/{name}", strategy, replicas=2, steps=12, cut=cut, optimizer=optimizer)
        for name, (strategy, optimizer, cut) in STRATEGIES.items()
    }
    left, straight = {}, {}
    for shards in (1, 2):
        both = {name: replace(s, shards=shards, every=0) for name, s in setups.items()}
        for name, setup in setups.items():
            directory = f"{setup.directory}_killed_{shards}"
            both[f"{name}_killed"] = replace(setup, directory=directory, shards=shards, kill_after=3)
        found = run(both, top / f"straight_{shards}")
        straight[shards] = {name: found[name] for name in setups}
        left[shards] = {name: unite(top / f"{name}_killed_{shards}", shards) for name in setups}
    return straight, left, setups


@pytest.fixture(scope="module")
def resumed(begun, tmp_path_factory):
    """What killed runs came to, by (strategy, shards before); made when they are first asked for, by shards after."""
    _, left, setups = begun
    top, made = tmp_path_factory.mktemp("resumed"), {}

    def make(after):
        again = {}
        for name, before in [(name, before) for name, before, shards in CASES if shards == after]:
            directory = f"{top}/{name}_{before}_{after}"
            for shard in range(after):
                shutil.copytree(left[before][name], f"{directory}/{after}/{shard}/checkpoints")
            again[name, before] = replace(setups[name], directory=directory, shards=after, resume=True, every=0)
        return run(again, top / f"{after}")

    return lambda after: made[after] if after in made else made.setdefault(after, make(after))


@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_a_run_goes_on_with_any_number_of_shards(name, before, after, begun, resumed):
    whole, shards = begun[0][before][name], resumed(after)[name, before]
    for shard in shards:
        assert not shard["failure"]
        assert shard["digests"][0] == shard["digests"][1] is not None
        assert shard["records"][0]["step"] == 12
        for index in (0, 1):
            for parameter, value in whole[0]["parameters"][index].items():
                found = shard["parameters"][index][parameter]
                torch.testing.assert_close(found, value, **({"rtol": 0, "atol": 0} if before == after else CLOSE))
    for index in (0, 1):
        losses = [mean(whole, index, step) for step in range(8, 12)]
        assert [mean(shards, index, step) for step in range(4)] == pytest.approx(losses, rel=1e-4)
    if before == after:
        for number, shard in enumerate(shards):
            assert shard["losses"] == {i: losses[8:] for i, losses in whole[number]["losses"].items()}
            assert shard["digests"] == whole[number]["digests"]


def mean(shards, index, step):
    """Loss of a replica in a step."""
    return sum(shard["losses"][index][step] for shard in shards) / len(shards)


def test_tokens_of_a_round_that_was_begun_with_other_shards_count_once(tmp_path):
    setup = ShardedRun(f"{tmp_path}/run", {"name": "diloco", "inner_steps": 4}, replicas=2, steps=12, every=0)
    (first,) = run({"run": replace(setup, stop_at=(1, 6))}, tmp_path / "before")["run"]
    left = Storage(f"{setup.directory}/1/0")
    begun = whole_manifest(left, f"checkpoints/{whole_checkpoints(left)[-1]}")
    assert any(tokens for _, tokens, _ in begun["unshared"].values())
    assert first["summary"]["tokens"] == begun["totals"]["tokens"] == 2 * 4 * 8
    for shard in range(2):
        shutil.copytree(f"{setup.directory}/1/0/checkpoints", f"{setup.directory}/2/{shard}/checkpoints")
    shards = run({"run": replace(setup, shards=2, resume=True)}, tmp_path / "after")["run"]
    counted = [shard["summary"]["tokens"] - begun["totals"]["tokens"] for shard in shards]
    assert sum(counted) == 2 * 8 * 8
