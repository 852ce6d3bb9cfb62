"""Relative paths mean the same to the job and to its replicas, or are refused."""

import pytest

from jobs._paths import settled
from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.core.errors import SettingError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """As Ray unpacks the working directory of a job."""
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def configured(*argv):
    return settled(load_config(["--data.name", "files", *argv], TrainConfig, {}))


def test_inputs_become_absolute(here):
    (here / "llama").mkdir()
    (here / "bytes").mkdir()
    config = configured("--data.path", "data/*.txt", "--model.init_from", "old/model", "--model.name", "hf:llama")
    assert config.data.path == str(here / "data/*.txt")
    assert config.model.init_from == str(here / "old/model")
    assert config.model.name == f"hf:{here}/llama"
    assert config.data.tokenizer == "bytes"
    assert config.run.output_dir == "outputs"


@pytest.mark.parametrize("path", ["/data/x.txt", "s3://bucket/x.parquet"])
def test_what_is_absolute_stays(path, here, unpacked):
    assert configured("--data.path", path, "--run.output_dir", "/results").data.path == path


def test_names_stay(here):
    config = configured("--model.name", "hf:org/model", "--data.tokenizer", "org/tokenizer")
    assert (config.model.name, config.data.tokenizer) == ("hf:org/model", "org/tokenizer")


def test_in_a_submitted_job_inputs_stay_relative(unpacked):
    (unpacked / "text").mkdir()
    (unpacked / "text" / "x.txt").touch()
    for path in ("text", "text/*.txt"):
        assert configured("--data.path", path, "--run.output_dir", "s3://bucket/out").data.path == path


def test_in_a_submitted_job_inputs_must_have_been_sent(unpacked):
    with pytest.raises(SettingError, match=r"data\.path = 'text/x\.txt': is not in the working directory .*gitignore"):
        configured("--data.path", "text/x.txt", "--run.output_dir", "/results")


@pytest.mark.parametrize("where", ["outputs", "", "."])
def test_in_a_submitted_job_results_go_elsewhere(where, unpacked):
    with pytest.raises(SettingError, match=r"run\.output_dir = .* name an absolute path"):
        configured("--run.output_dir", where)
    with pytest.raises(SettingError, match=r"run\.output_dir"):
        configured("--run.output_dir", str(unpacked / where))


def test_in_a_submitted_job_the_tracking_store_is_elsewhere(unpacked):
    argv = ("--run.output_dir", "/results", "--tracking.uri")
    with pytest.raises(SettingError, match=r"tracking\.uri = 'sqlite:///mlflow\.db'"):
        configured(*argv, "sqlite:///mlflow.db")
    configured(*argv, "sqlite:////results/mlflow.db")
    configured(*argv, "https://mlflow.example.org")


def test_a_trainer_refuses_it_too(unpacked):
    from ray_lowcomm.core.settings import RunSettings
    from ray_lowcomm.runtime.run_folder import RunFolder

    with pytest.raises(SettingError, match=r"run\.output_dir = 'outputs'"):
        RunFolder(RunSettings()).__enter__()
