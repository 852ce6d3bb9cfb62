import json
import resource

import numpy as np
import pytest
import torch

from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.tracking.files import RunFiles, plain

from .helpers import record


def rounds(folder):
    return [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_line_is_in_the_file_at_once(tmp_path):
    files = RunFiles(str(tmp_path / "a" / "run"))
    files.round(record(1, val_loss=float("nan")))
    files.round(record(2, loss=float("inf")))
    lines = [json.loads(line) for line in (tmp_path / "a" / "run" / "rounds.jsonl").read_text().splitlines()]
    assert lines[0] == record(1)
    assert lines[1]["loss"] is None


def test_resume_drops_later_and_broken_lines(tmp_path):
    files = RunFiles(str(tmp_path))
    for number in range(1, 6):
        files.round(record(number))
    files.close()
    with (tmp_path / "rounds.jsonl").open("a") as stream:
        stream.write('{"round": 6, "st')
    again = RunFiles(str(tmp_path), resumed_round=3)
    again.round(record(4))
    assert rounds(tmp_path) == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rounds.jsonl"]


def test_a_new_run_starts_anew(tmp_path):
    RunFiles(str(tmp_path)).round(record(1))
    RunFiles(str(tmp_path))
    assert rounds(tmp_path) == []


def test_summary_and_config(tmp_path):
    files = RunFiles(str(tmp_path))
    files.config("run: {seed: 1}\n")
    files.summary({"train_loss": torch.tensor(1.5), "rounds": np.int64(3), "state_digests": {0: "a"}})
    files.summary({"train_loss": float("nan"), "members": (0, 1)})
    assert (tmp_path / "config.yaml").read_text() == "run: {seed: 1}\n"
    assert json.loads((tmp_path / "summary.json").read_text()) == {"train_loss": None, "members": [0, 1]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "rounds.jsonl", "summary.json"]


def test_plain_numbers():
    assert plain({0: torch.tensor(1.5), "b": np.int64(3), "c": (None, True, "x")}) == {
        "0": 1.5,
        "b": 3,
        "c": [None, True, "x"],
    }


def test_a_store_that_cannot_append_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr("ray_lowcomm.tracking.files._is_local", lambda files: False)
    files = RunFiles(tmp_path.as_uri())
    for number in range(1, 53):
        files.round(record(number))
    assert len(rounds(tmp_path)) == 50
    files.close()
    files.close()
    assert len(rounds(tmp_path)) == 52
    again = RunFiles(tmp_path.as_uri(), resumed_round=51)
    again.round(record(52))
    again.close()
    assert rounds(tmp_path) == list(range(1, 53))


def test_unknown_file_system():
    with pytest.raises(SettingError, match=r"run\.output_dir = 'nonsense://x/y'"):
        RunFiles("nonsense://x/y")


@pytest.fixture
def full_disk():
    """Call with a number of bytes: no file can be longer, as if the disk were full; with None there is room again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)


def test_what_a_full_disk_does_not_take_is_written_when_there_is_room(tmp_path, full_disk):
    said = []
    files = RunFiles(str(tmp_path), say=said.append)
    files.round(record(1))
    line = (tmp_path / "rounds.jsonl").stat().st_size
    full_disk(line + line // 2)
    files.round(record(2))
    files.config("run: {seed: 1}\n" * line)
    files.round(record(3))
    assert rounds(tmp_path) == [1]  # no half line
    assert [path.name for path in tmp_path.iterdir()] == ["rounds.jsonl"]
    (once,) = said
    assert "cannot be written: File too large; training goes on, and it is tried again with each round" in once
    full_disk(None)
    files.round(record(4))
    assert rounds(tmp_path) == [1, 2, 3, 4]
    assert (tmp_path / "config.yaml").exists()
    assert said[1:] == [f"{tmp_path} is written again, and complete"]


def test_a_round_that_comes_again_while_the_disk_is_full(tmp_path, full_disk):
    files = RunFiles(str(tmp_path))
    for number in (1, 2, 3):
        files.round(record(number))
    full_disk((tmp_path / "rounds.jsonl").stat().st_size)
    files.round(record(4))
    files.round(record(3, loss=9.0))  # all replicas were lost
    files.round(record(4))
    full_disk(None)
    files.close()
    assert rounds(tmp_path) == [1, 2, 3, 4]
    assert json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[2])["loss"] == 9.0


def test_a_summary_waits_for_room_and_then_says_what_is_wrong(tmp_path, full_disk, monkeypatch):
    files = RunFiles(str(tmp_path))
    full_disk(0)
    with pytest.raises(FleetError, match=r"cannot be written: .*File too large; mend that and go on with"):
        files.summary({"rounds": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["rounds.jsonl"]
    monkeypatch.setattr("ray_lowcomm.tracking.files.time.sleep", lambda seconds: full_disk(None))
    full_disk(0)
    files.summary({"rounds": 3}, wait_s=1000.0)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"rounds": 3}
