"""Checkpoints that are torn, damaged, foreign or too many."""

import json

import pytest
import torch
from torch import nn

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.engine.checkpoint import (
    find_newest,
    load_tensors,
    read_manifest,
    save_tensors,
    whole_checkpoints,
    write_manifest,
)
from ray_lowcomm.engine.storage import Storage

from .local_run import Setup
from .test_resume import VARIANTS


@pytest.fixture
def run(tmp_path):
    """A run that died in round 4: checkpoints 1 to 3 are whole, and the straight run beside it."""
    setup = Setup(f"{tmp_path}/run", VARIANTS["dct"], replicas=2)
    assert setup.go(kill_after=4).killed
    return setup, tmp_path / "run" / "checkpoints"


def newest(setup):
    return find_newest(Storage(setup.directory))


def test_the_newest_whole_checkpoint_is_found(run):
    setup, _ = run
    found = newest(setup)
    assert (found.folder, found.manifest["round"], found.skipped) == ("checkpoints/round_000003", 3, ())


def remove_manifest(folder):
    (folder / "manifest.json").unlink()


def cut_manifest(folder):
    (folder / "manifest.json").write_text('{"format": 2, "rou')


def newer_format(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 3}))


def remove_part(folder):
    (folder / "replica_0001.safetensors").unlink()


def cut_part(folder):
    path = folder / "shared.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("tear", "said"),
    [
        (remove_manifest, None),
        (cut_manifest, "cannot be read"),
        (newer_format, "has format 3, and this version reads format 2"),
        (remove_part, "replica_0001.safetensors is missing or cut off"),
        (cut_part, "shared.safetensors is missing or cut off"),
    ],
)
def test_a_torn_checkpoint_is_passed_over(run, tear, said):
    setup, folder = run
    tear(folder / "round_000003")
    found = newest(setup)
    assert found.folder == "checkpoints/round_000002"
    assert (said is None and found.skipped == ()) or said in found.skipped[0]
    resumed = setup.go(resume=True)
    assert not resumed.failure
    assert resumed.records[0]["round"] == 3
    assert newest(setup).manifest["round"] == 4


def test_a_file_whose_bytes_have_changed_is_not_loaded(run):
    setup, folder = run
    path = folder / "round_000003" / "replica_0001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    resumed = setup.go(resume=True)
    assert "replica 1" in resumed.failure
    assert "round_000003/replica_0001.safetensors is damaged" in resumed.failure


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match="has no whole checkpoint to go on from"):
        find_newest(Storage(str(tmp_path)))


def test_nothing_but_torn_checkpoints_says_what_is_wrong(run):
    setup, folder = run
    for number in (1, 2, 3):
        cut_part(folder / f"round_{number:06d}")
    with pytest.raises(CheckpointError, match=r"round_000003/shared.safetensors is missing or cut off"):
        newest(setup)


def test_a_checkpoint_of_another_algorithm_is_refused(run):
    setup, _ = run
    other = Setup(setup.directory, VARIANTS["diloco"], replicas=2)
    with pytest.raises(CheckpointError, match=r"strategy.name = dct_momentum, this run has diloco.*init_from"):
        other.go(resume=True)


def test_a_checkpoint_of_another_model_is_refused(run):
    setup, _ = run
    setup.model = lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Identity(), nn.Linear(9, 1))
    failure = setup.go(resume=True).failure
    assert "does not fit: parameters other shapes: " in failure
    for difference in (
        "0.bias ([8] there, [9] in",
        "0.weight ([8, 6] there, [9, 6] in",
        "3.weight ([1, 8] there, [1, 9] in",
    ):
        assert difference in failure
    assert failure.endswith(": another model?")


def test_a_variant_without_the_saved_residual_is_refused(run):
    setup, _ = run
    setup.strategy = VARIANTS["dct_buffer"]
    assert "strategy.residual was 'model', is 'buffer'" in setup.go(resume=True).failure


# ---- keeping ----------------------------------------------------------------------------------------------------


def test_only_the_newest_are_kept(tmp_path):
    Setup(str(tmp_path), VARIANTS["dct"], replicas=2, keep=2).go()
    assert whole_checkpoints(Storage(str(tmp_path))) == ["round_000003", "round_000004"]


def test_unfinished_attempts_are_cleared_away_once_a_newer_one_is_whole(tmp_path):
    storage = Storage(str(tmp_path))
    for number in (1, 2, 3):
        save_tensors(storage, f"checkpoints/round_{number:06d}/shared.safetensors", {"a": torch.ones(1)})
    (tmp_path / "checkpoints" / "notes").mkdir()
    write_manifest(storage, "checkpoints/round_000002", {"format": 2}, 2)
    assert storage.folders("checkpoints") == ["notes", "round_000002", "round_000003"]


def test_a_million_rounds_are_still_in_order(tmp_path):
    storage = Storage(str(tmp_path))
    for number in (999_998, 999_999, 1_000_000):
        write_manifest(storage, f"checkpoints/round_{number:06d}", {"format": 2, "files": {}, "round": number}, 2)
    assert whole_checkpoints(storage) == ["round_999999", "round_1000000"]
    assert find_newest(storage).manifest["round"] == 1_000_000


def test_a_disk_that_refuses_costs_the_checkpoint_not_the_run(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    outcome = Setup(str(tmp_path), VARIANTS["dct"], replicas=2).go()
    assert not outcome.failure
    assert outcome.said("manifest") == []
    assert any("checkpoint of round 1 is given up: replica " in text for text in outcome.said("notice"))
    assert (tmp_path / "model" / "model.safetensors").exists()


# ---- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_as_they_were(tmp_path, dtype):
    storage = Storage(str(tmp_path))
    whole = torch.arange(12).reshape(3, 4)
    tensors = {"plain": whole, "column": whole[:, 1], "transposed": whole.t(), "scalar": whole[0, 1], "none": whole[:0]}
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    info = save_tensors(storage, "t.safetensors", tensors)
    back = load_tensors(storage, "t.safetensors", info)
    for name, value in tensors.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], value)


def test_a_missing_manifest_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="round_000009 has no manifest"):
        read_manifest(Storage(str(tmp_path)), "checkpoints/round_000009")


def test_a_file_is_replaced_as_a_whole(tmp_path):
    storage = Storage(str(tmp_path))
    storage.write("a/b", b"first")
    storage.write("a/b", b"second")
    assert storage.read("a/b") == b"second"
    assert storage.size("a/b") == 6
    assert storage.size("a/c") is None
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_uris_are_as_good_as_paths(tmp_path):
    storage = Storage(f"file://{tmp_path}")
    storage.write("x/y", b"z")
    assert (tmp_path / "x" / "y").read_bytes() == b"z"
    assert storage.folders("") == ["x"]
