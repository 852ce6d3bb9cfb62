"""Checkpoints that are torn, damaged, foreign or too many."""

import errno
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.engine import duties, restoring
from ray_lowcomm.engine import storage as storage_module
from ray_lowcomm.engine.checkpoint import (
    Source,
    find_newest,
    load_member,
    load_tensors,
    save_tensors,
    whole_checkpoints,
    write_manifest,
)
from ray_lowcomm.engine.manifest import read_manifest, store_manifest
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.transport.later import Later
from ray_lowcomm.transport.local import LocalLink

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


FILES = ("manifest.json", "shared.safetensors", "replica_0000.safetensors", "replica_0001.safetensors")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip_a_bit, Path.unlink])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_gone_on_from(run, file, damage):
    setup, folder = run
    damage(folder / "round_000003" / file)
    found = newest(setup)
    assert found.folder == "checkpoints/round_000002"
    if (file, damage) == ("manifest.json", Path.unlink):  # it was never whole
        assert found.skipped == ()
    else:
        assert f"round_000003/{file} " in found.skipped[0]
    resumed = setup.go(resume=True)
    assert not resumed.failure
    assert resumed.records[0]["round"] == 3
    assert newest(setup).manifest["round"] == 4


def edited(folder, change, seal):
    """Change a manifest as text, as an editor would, or with a checksum that fits."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if seal:
        store_manifest(Storage(str(folder.parent)), folder.name, manifest)
    else:
        path.write_text(json.dumps(manifest, indent=1))


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest.update(step=manifest["step"] + 1),
        lambda manifest: manifest.update(round=2),
        lambda manifest: manifest["files"].clear(),
        lambda manifest: manifest.pop("checksum"),
        lambda manifest: manifest["totals"].update(inner_steps=0),
    ],
)
def test_an_edited_manifest_is_refused(run, change):
    setup, folder = run
    edited(folder / "round_000003", change, seal=False)
    assert "round_000003/manifest.json is damaged, or was edited" in newest(setup).skipped[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda manifest: manifest.pop("history"), "history is None"),
        (lambda manifest: manifest.update(totals=[]), r"totals is []"),
        (lambda manifest: manifest["files"].clear(), "shared.safetensors is not among its files"),
        (lambda manifest: manifest["files"].pop("replica_0001.safetensors"), "replica_0001.safetensors is not among"),
        (lambda manifest: manifest.update(members=[]), "it has no members"),
        (lambda manifest: manifest.update(format=2), "has format 2, and this version reads format 3"),
    ],
)
def test_a_manifest_that_lacks_something_is_refused(run, change, said):
    setup, folder = run
    edited(folder / "round_000003", change, seal=True)
    assert said in newest(setup).skipped[0]
    assert "round_000003/manifest.json" in newest(setup).skipped[0]


def test_what_is_damaged_after_it_was_looked_at_is_not_loaded(run):
    setup, folder = run
    found = newest(setup)
    flip_a_bit(folder / "round_000003" / "replica_0001.safetensors")
    source = Source(Storage(setup.directory), found.folder, found.manifest)
    with pytest.raises(CheckpointError, match=r"round_000003/replica_0001.safetensors is damaged"):
        load_member(source, 1, (0, 1), ())


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(CheckpointError, match="has no whole checkpoint to go on from"):
        find_newest(Storage(str(tmp_path)))


def test_nothing_but_torn_checkpoints_says_what_is_wrong(run):
    setup, folder = run
    for number in (1, 2, 3):
        cut(folder / f"round_{number:06d}" / "shared.safetensors")
    with pytest.raises(CheckpointError, match=r"round_000003/shared.safetensors is cut off"):
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
    write_manifest(storage, "checkpoints/round_000002", {"round": 2}, 2)
    assert storage.folders("checkpoints") == ["notes", "round_000002", "round_000003"]


def test_a_million_rounds_are_still_in_order(tmp_path):
    storage = Storage(str(tmp_path))
    for number in (999_998, 999_999, 1_000_000):
        write_manifest(storage, f"checkpoints/round_{number:06d}", {"round": number}, 2)
    assert whole_checkpoints(storage) == ["round_999999", "round_1000000"]


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    setup = Setup(str(tmp_path), VARIANTS["dct"], replicas=2)
    setup.go(kill_after=2)

    def broken(storage, path, *what):
        raise OSError("connection reset")

    monkeypatch.setattr(restoring, "read_tensors", broken)
    failure = setup.go(resume=True).failure
    assert re.search(r"checkpoints/round_00000\d/shared.safetensors cannot be read: connection reset", failure)


# ---- full disks, and writing beside -----------------------------------------------------------------------------


@pytest.fixture
def full_disk(monkeypatch):
    """Call with a test of paths: what is written there finds no room after its first bytes (or meets another error)."""
    whole, refuse = Storage.write_pieces, [lambda path: False]
    errors = [OSError(errno.ENOSPC, "No space left on device")]

    def write_pieces(self, path, pieces):
        def first():
            yield next(iter(pieces))
            raise errors[-1]

        whole(self, path, first() if refuse[-1](path) else pieces)

    monkeypatch.setattr(Storage, "write_pieces", write_pieces)

    def refuse_more(test, *other):
        refuse.append(test)
        errors.extend(other)

    return refuse_more


def checksums(outcome):
    return {folder: manifest["files"] for folder, manifest in outcome.said("manifest")}


def test_whatever_a_file_cannot_be_written_for_costs_that_checkpoint_and_names_the_file(tmp_path, full_disk):
    file = "replica_0001.safetensors"
    full_disk(lambda path: path == f"checkpoints/round_000002/{file}", RuntimeError("no such bucket"))
    outcome = Setup(str(tmp_path), VARIANTS["dct"], replicas=2, every=2).go()
    assert not outcome.failure
    (said,) = [text for text in outcome.said("notice") if "given up" in text]
    assert f"checkpoint of round 2 is given up: replica 1: {file}: RuntimeError: no such bucket" in said
    assert list(checksums(outcome)) == ["checkpoints/round_000003", "checkpoints/round_000004"]


@pytest.mark.parametrize("file", ["shared.safetensors", "replica_0000.safetensors", "replica_0001.safetensors"])
def test_what_a_full_disk_has_left_of_a_checkpoint_is_removed_and_the_next_round_tries_again(tmp_path, full_disk, file):
    straight = Setup(f"{tmp_path}/a", VARIANTS["dct"], replicas=2).go()
    full_disk(lambda path: path == f"checkpoints/round_000002/{file}")
    outcome = Setup(f"{tmp_path}/b", VARIANTS["dct"], replicas=2, every=2).go()
    assert not outcome.failure
    assert [path.name for path in sorted((tmp_path / "b" / "checkpoints").iterdir())] == [
        "round_000003",
        "round_000004",
    ]
    assert not list((tmp_path / "b").rglob("*.unfinished"))
    (said,) = [text for text in outcome.said("notice") if "given up" in text]
    assert "checkpoint of round 2 is given up: replica " in said
    assert "No space left on device" in said
    assert "checkpoints are written again: checkpoints/round_000003 is whole" in outcome.said("notice")
    assert outcome.state(0) == straight.state(0)
    whole = checksums(straight)
    assert checksums(outcome) == {folder: whole[folder] for folder in checksums(outcome)}


def test_a_disk_that_stays_full_costs_the_checkpoints_not_the_training(tmp_path, full_disk, monkeypatch):
    full_disk(lambda path: path.startswith("checkpoints/"))
    monkeypatch.setattr(duties, "SPACE_WAIT_S", 0.0)
    outcome = Setup(str(tmp_path), VARIANTS["dct"], replicas=2).go()
    assert not outcome.failure
    assert outcome.said("manifest") == []
    assert len([text for text in outcome.said("notice") if "given up" in text]) == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_the_final_model_and_checkpoint_wait_for_room(tmp_path, full_disk, monkeypatch):
    full_disk(lambda path: path.startswith(("model/", "checkpoints/round_000004/replica_0001")))
    pauses = []

    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) % 3 == 0:
            full_disk(lambda path: path.startswith("checkpoints/round_000004/replica_0001") and len(pauses) < 6)

    monkeypatch.setattr(storage_module.time, "sleep", sleep)
    outcome = Setup(str(tmp_path), VARIANTS["dct"], replicas=2).go()
    assert not outcome.failure
    assert len(pauses) == 6
    assert newest(Setup(str(tmp_path), VARIANTS["dct"])).manifest["round"] == 4
    assert (tmp_path / "model" / "model.safetensors").exists()
    said = [text for text in outcome.said("notice") if "cannot be written" in text]
    assert [text.split(":")[1] for text in said] == [
        " the final model cannot be written",
        " the last checkpoint cannot be written",
    ]


def test_without_room_for_the_final_model_the_run_fails_and_says_what_to_do(tmp_path, full_disk, monkeypatch):
    full_disk(lambda path: path.startswith("model/"))
    monkeypatch.setattr(duties, "SPACE_WAIT_S", 0.0)
    setup = Setup(str(tmp_path), VARIANTS["dct"], replicas=2)
    failure = setup.go().failure
    assert "the final model cannot be written: [Errno 28] No space left on device; mend that and go on with" in failure
    full_disk(lambda path: False)
    again = setup.go(resume=True)
    assert not again.failure
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_checkpoint_that_is_written_while_the_next_steps_are_taken_is_of_its_round(tmp_path, monkeypatch):
    """The writer gets on only when the replica asks for the third time how far it is."""

    class Slow:
        def __init__(self, work):
            self.work, self.asked = Later(work), 0

        def done(self):
            self.asked += 1
            return self.asked >= 3 and self.work.done()

        def result(self):
            return self.work.result()

    straight = Setup(f"{tmp_path}/a", VARIANTS["dct"], replicas=2).go()
    beside = LocalLink.beside
    writes = duties.Duties.save.__qualname__
    monkeypatch.setattr(
        LocalLink, "beside", lambda self, work: Slow(work) if writes in work.__qualname__ else beside(self, work)
    )
    outcome = Setup(f"{tmp_path}/b", VARIANTS["dct"], replicas=2, every=2).go()
    assert not outcome.failure
    assert outcome.state(0) == straight.state(0)
    whole = checksums(straight)
    assert list(checksums(outcome)) == ["checkpoints/round_000002", "checkpoints/round_000004"]
    assert checksums(outcome) == {folder: whole[folder] for folder in checksums(outcome)}
    totals = [dict(outcome.said("manifest"))["checkpoints/round_000002"], dict(straight.said("manifest"))]
    assert totals[0]["positions"] == totals[1]["checkpoints/round_000002"]["positions"]
    assert totals[0]["totals"]["inner_steps"] == totals[1]["checkpoints/round_000002"]["totals"]["inner_steps"]


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
