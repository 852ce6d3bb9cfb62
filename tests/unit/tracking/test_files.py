import json

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


def test_a_full_disk_is_one_line(tmp_path):
    files = RunFiles(str(tmp_path))
    (tmp_path / "rounds.jsonl").unlink()
    (tmp_path / "rounds.jsonl").symlink_to("/dev/full")
    with pytest.raises(FleetError, match=r"rounds\.jsonl cannot be written: No space left on device"):
        files.round(record(1))
