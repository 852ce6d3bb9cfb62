"""One command that survives restarts: ``--run.resume auto``. Replicas share one process."""

import json

import pytest
import yaml

from jobs import train, tune
from jobs._main import run_main

SMALL = [
    *(
        "--fleet.transport",
        "local",
        "--tracking.enabled",
        "false",
        "--data.name",
        "digits",
        "--model.name",
        "small_cnn",
    ),
    *("--inner.steps", "12", "--strategy.name", "diloco", "--strategy.inner_steps", "4", "--checkpoint.every", "1"),
]


@pytest.fixture
def auto(tmp_path, capfd):
    """Runs the one command; returns its exit code and what it printed."""

    def run(*argv):
        code = run_main(train.main, ["--run.output_dir", str(tmp_path), "--run.resume", "auto", *SMALL, *argv])
        out = capfd.readouterr()
        return code, out.out + out.err

    return run


def _rounds(folder):
    return [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_it_begins_goes_on_and_is_done(auto, tmp_path):
    code, _ = auto("--inner.steps", "8", "--inner.lr", "0.002")
    assert code == 0
    folder = tmp_path / "default"
    assert _rounds(folder) == [1, 2]

    code, out = auto()
    assert (code, _rounds(folder)) == (0, [1, 2, 3])
    assert "resumed from round 2" in out
    assert yaml.safe_load((folder / "config.yaml").read_text())["inner"]["lr"] == 0.002

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, out = auto()
    assert code == 0
    assert "is complete: there is nothing to go on with up to step 12" in out
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["default"]


def test_a_folder_without_a_checkpoint_is_moved_aside_and_its_settings_forgotten(auto, tmp_path):
    folder = tmp_path / "default"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {name: nonsense}\n")
    code, out = auto()
    assert code == 0
    assert "an older run of this name was moved to" in out
    assert _rounds(folder) == [1, 2, 3]


def test_checkpoints_that_are_all_damaged_are_not_passed_over(auto, tmp_path):
    auto("--inner.steps", "8")
    for file in (tmp_path / "default" / "checkpoints").rglob("replica_0001.safetensors"):
        file.unlink()
    code, out = auto()
    assert code == 1
    assert "has no whole checkpoint to go on from (checkpoints/round_000002/replica_0001.safetensors is missing" in out


def test_a_sweep_is_begun_or_gone_on_with(tmp_path):
    argv = ["--space", "diloco", "--run.output_dir", str(tmp_path), "--run.name", "sweep", "--resume", "auto"]
    assert tune.load_sweep(argv).resume is False
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "config.yaml").write_text("space: diloco\nnum_samples: 3\n")
    resumed = tune.load_sweep(argv)
    assert (resumed.resume, resumed.num_samples) == (True, 3)
