import sys

import pytest

from ray_lowcomm.config import load_config, to_yaml
from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.core.settings import RunSettings
from ray_lowcomm.runtime.owned_folder import folder_path
from ray_lowcomm.tuning.settings import SweepConfig, named
from ray_lowcomm.tuning.sweep_folder import SweepFolder, check_unchanged, saved_config


def config(*argv):
    return named(load_config(["--space", "toy", *argv], SweepConfig, {}))


def begun(tmp_path, *argv):
    """The folder of a sweep that was told `argv`."""
    run = RunSettings(output_dir=str(tmp_path), name="s")
    with SweepFolder(run, resume=False) as folder:
        path = tmp_path / "s"
        path.mkdir()
        (path / "config.yaml").write_text(to_yaml(config(*argv)))
        return run, folder.path


def test_an_older_sweep_is_moved_aside(tmp_path):
    run, _ = begun(tmp_path)
    with SweepFolder(run, resume=False) as folder:
        (aside,) = tmp_path.glob("s.*")
        assert folder.said == f"an older sweep of this name was moved to {aside}"
        assert (aside / "config.yaml").exists()


def test_one_at_a_time(tmp_path):
    run, _ = begun(tmp_path)
    with (
        SweepFolder(run, resume=True),
        pytest.raises(FleetError, match="belongs to a run or sweep that is going on"),
        SweepFolder(run, resume=True),
    ):
        pass
    with SweepFolder(run, resume=True) as folder:
        assert folder.said == ""


def test_nothing_to_resume(tmp_path):
    with (
        pytest.raises(FleetError, match="has no sweep to resume"),
        SweepFolder(RunSettings(output_dir=str(tmp_path)), True),
    ):
        pass
    assert saved_config(RunSettings(output_dir=str(tmp_path))) is None


def test_a_place_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(SettingError, match=r"run\.output_dir"),
        SweepFolder(RunSettings(output_dir=f"{tmp_path}/file"), False),
    ):
        pass


def test_an_older_sweep_at_a_uri_is_left_alone(tmp_path):
    run, _ = begun(tmp_path)
    remote = RunSettings(output_dir=tmp_path.as_uri(), name="s")
    assert folder_path(remote) == f"{tmp_path.as_uri()}/s"
    with pytest.raises(FleetError, match="holds an older sweep"), SweepFolder(remote, resume=False):
        pass
    with SweepFolder(remote, resume=True):
        pass


@pytest.mark.parametrize(
    "argv",
    [["--time-budget", "9"], ["--register", "x"], ["--tracking.uri", "http://h"], ["--fleet.address", "h:1"], []],
)
def test_what_may_change_at_a_resume(tmp_path, argv):
    _, path = begun(tmp_path, "--num-samples", "3")
    check_unchanged(config("--num-samples", "3", "--resume", *argv), path)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            ["--num-samples", "4"],
            "num_samples = 4: the sweep was begun with 3, and cannot be resumed with anything else",
        ),
        (["--num-samples", "3", "--strategy.topk", "9"], "strategy.topk = 9: the sweep was begun with None"),
        (["--num-samples", "3", "--model.args.width", "9"], "model.args.width = 9: the sweep was begun with None"),
    ],
)
def test_what_may_not(tmp_path, argv, said):
    _, path = begun(tmp_path, "--num-samples", "3")
    with pytest.raises(SettingError) as caught:
        check_unchanged(config("--resume", *argv), path)
    assert str(caught.value).startswith(said)


def test_the_folder_of_a_run_is_no_sweep(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")
    with pytest.raises(FleetError, match="is of a run, not of a sweep"):
        check_unchanged(config(), str(tmp_path))


@pytest.mark.parametrize("uri", ["s3://", "gs:///"])
def test_a_uri_that_names_no_place(uri):
    with pytest.raises(SettingError, match="names no bucket or folder"):
        SweepFolder(RunSettings(output_dir=uri), False)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_folder_in_which_no_file_can_be_is_not_called_taken():
    with pytest.raises(SettingError, match="cannot be used"), SweepFolder(RunSettings(output_dir="/proc"), False):
        pass
