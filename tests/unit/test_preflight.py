"""What needs no cluster is said before one is reached for; what only the nodes can know is not."""

import sys

import pytest
import torch

from jobs import train, tune
from jobs._main import run_main
from ray_lowcomm.config import TrainConfig, load_config
from ray_lowcomm.core.errors import FleetError, LowCommError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.preflight import preflight

FACTORIES = """
import torch
def make(width: int) -> torch.nn.Module:
    raise AssertionError("no weights are made here")
number = 3
"""

OWN_LAYERS = """
import torch
def make() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_models.py").write_text(FACTORIES)
    (tmp_path / "corpus").mkdir()
    for name in ("train.txt", "valid.txt"):
        (tmp_path / "corpus" / name).write_text("text " * 50)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "weights.safetensors").write_bytes(b"no weights")
    yield tmp_path
    sys.modules.pop("own_models", None)


def config(*argv):
    return load_config(argv, TrainConfig, {})


FILES = ("--data.name", "files", "--data.path")

KNOWN = {
    "no such model": (("--model.name", "gpt9"), "model.name = 'gpt9': must be one of byte_gpt, small_cnn"),
    "no such argument": (("--model.args.depth", "3"), "model.args do not fit 'byte_gpt': .*'depth'; its arguments"),
    "arguments that disagree": (("--model.args.width", "65"), "model.args.width = 65: must be a multiple of"),
    "no such factory": (("--model.name", "own_models:made"), "module 'own_models' has no 'made'"),
    "no function": (("--model.name", "own_models:number"), "'number' is a int, not a function"),
    "arguments of a factory": (
        ("--model.name", "own_models:make"),
        "do not fit .*missing a required argument: 'width'",
    ),
    "no such source": (("--data.name", "imagenet"), "data.name = 'imagenet': must be python_stdlib, digits, files"),
    "no data set": (("--data.name", "hf:"), "give the name of a data set after 'hf:'"),
}
ONLY_HERE = {
    "no such module": (("--model.name", "nowhere:make"), "cannot import 'nowhere'"),
    "no such folder": (("--model.name", "hf:nowhere"), "hf:nowhere"),
    "no such files": ((*FILES, "/nowhere/*.txt"), "data.path = '/nowhere/\\*.txt': no such file or folder"),
    "no rows": ((*FILES, "empty.txt"), "the data set is empty"),
    "no such split": ((*FILES, "corpus", "--data.split", "test"), "has no split 'test' .* its files are train, valid"),
    "no such weights": (("--model.init_from", "/nowhere"), "model.init_from = '/nowhere': no such file or folder"),
    "no weights": (("--model.init_from", "weights.safetensors"), "is not a readable safetensors file"),
}


@pytest.mark.parametrize("case", KNOWN | ONLY_HERE)
def test_it_is_said_in_one_line(case):
    argv, said = (KNOWN | ONLY_HERE)[case]
    for transport in ("ray", "local"):
        with pytest.raises(LowCommError, match=said) as caught:
            preflight(config(*argv, "--fleet.transport", transport))
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("case", KNOWN | ONLY_HERE)
def test_of_a_cluster_elsewhere_only_what_is_known_is_refused(case, monkeypatch):
    argv, said = (KNOWN | ONLY_HERE)[case]
    for address in (("--fleet.address", "head:6379"), ()):
        if not address:
            monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
        if case in ONLY_HERE:
            preflight(config(*argv, *address))
        else:
            with pytest.raises(LowCommError, match=said):
                preflight(config(*argv, *address))


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--model.name", "small_cnn", "--data.name", "digits", "--model.args.width", "100000"),
        ("--model.args", '{"width": 200000, "layers": 400}'),  # far more than there is memory for
        ("--model.name", "own_models:make", "--model.args.width", "3"),
        (*FILES, "corpus"),
        (*FILES, "corpus/*.txt", "--data.split", "valid"),
        (*FILES, "s3://bucket/x.parquet"),
        ("--data.name", "hf:some/name"),
    ],
)
def test_what_can_be_made_and_found_passes_without_being_made_or_read(argv):
    before = torch.random.get_rng_state()
    preflight(config(*argv))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_a_space_draws_is_not_judged():
    preflight(config("--model.name", "gpt9"), ["model.name"])
    with pytest.raises(LowCommError, match="gpt9"):
        preflight(config("--model.name", "gpt9"), ["data.path"])


def test_a_trial_is_on_the_cluster_whatever_its_transport():
    local = ("--fleet.transport", "local", "--model.name", "nowhere:make")
    preflight(config(*local, *()).model_copy(update={"fleet": FleetSettings(transport="local", address="h:1")}), [])
    with pytest.raises(LowCommError, match="nowhere"):
        preflight(config(*local), [])


@pytest.mark.parametrize("case", KNOWN | ONLY_HERE)
def test_jobs_say_it_before_ray_is_reached_for(case, capsys, monkeypatch, here):
    def reached(*given, **more):
        raise AssertionError("Ray was reached for")

    monkeypatch.setattr("ray_lowcomm.runtime.cluster.connect", reached)
    monkeypatch.setattr("ray_lowcomm.tuning.sweep.connect", reached, raising=False)
    argv, _ = (KNOWN | ONLY_HERE)[case]
    common = ["--run.output_dir", str(here / "out"), "--tracking.enabled", "false"]
    for job, more in ((train, []), (tune, ["--space", "diloco"])):
        assert run_main(job.main, [*common, *more, *argv]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert not (here / "out").exists()


@pytest.mark.parametrize(
    "model",
    [
        ("--model.args.layers", "2"),
        ("--model.name", "own_layers:make", "--data.name", "files", "--data.path", "corpus"),
    ],
)
def test_more_fragments_than_the_model_has_pieces_are_refused_before_there_is_a_run(model, capsys, monkeypatch, here):
    (here / "own_layers.py").write_text(OWN_LAYERS)
    monkeypatch.setattr("ray_lowcomm.runtime.cluster.connect", None)
    argv = ["--run.output_dir", str(here / "out"), "--strategy.inner_steps", "4096", "--inner.steps", "8192", *model]
    assert run_main(train.main, [*argv, "--strategy.fragments", "4096"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "strategy.fragments = 4096" in said[0]
    assert not (here / "out").exists()
    preflight(config(*argv, "--strategy.fragments", "2"))


def test_a_resume_of_nothing_is_said_before_ray_is_reached_for(capsys, monkeypatch, here):
    monkeypatch.setattr("ray_lowcomm.runtime.cluster.connect", None)
    assert run_main(train.main, ["--run.output_dir", str(here), "--run.resume", "--tracking.enabled", "false"]) == 1
    assert "no whole checkpoint" in capsys.readouterr().err


def test_nccl_without_gpus_is_said_before_ray_is_started(monkeypatch):
    from ray_lowcomm.runtime.cluster import connect

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    fleet = FleetSettings(replicas=2, collective="nccl", resources_per_replica={"CPU": 1, "GPU": 1})
    with pytest.raises(FleetError, match=r"fleet\.collective = 'nccl': 2 GPUs needed, torch finds 1 on this machine"):
        connect(fleet, prints=False)
