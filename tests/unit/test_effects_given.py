"""Only what was given is refused: by a person, on the command line, in a file or in a program."""

import dataclasses
import inspect

import pytest
import torch
from torch import nn

from jobs.train import JobConfig
from ray_lowcomm import LowCommTrainer, effects, strategies
from ray_lowcomm.config import ConfigError, to_yaml
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import Fault, FleetSettings, StrategySettings

from .effects_help import (
    IMAGES,
    SGD,
    load,
    one,
)
from .engine.local_run import Setup


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_given_anywhere_is_given(file):
    with pytest.raises(ConfigError, match=r"data\.path = 'x': has no effect with data\.name"):
        load("--config", file("data: {path: x}\n"))
    with pytest.raises(ConfigError, match=r"data\.path = 'x': has no effect with data\.name"):
        load(environment={"RAY_LOWCOMM_DATA__PATH": "x"})
    with pytest.raises(ConfigError, match=r"inner\.betas"):
        load("--inner.betas", "[0.9, 0.99]", *SGD)
    load("--config", file("inner: {betas: [0.9, 0.99], optimizer: sgd}\n"))  # a file may spell out defaults
    assert load("--config", file("data: {path: x}\n"), "--data.name", "files").data.path == "x"


def test_the_file_of_a_run_is_accepted_and_what_is_idle_then_is_said(file):
    whole = file(to_yaml(load("--inner.betas", "[0.5, 0.6]", "--tracking.uri", "http://x")))
    assert load("--config", whole).remarks() == ()
    changed = load("--config", whole, *SGD, "--tracking.enabled", "false")
    said = " ".join(changed.remarks())
    assert "inner.betas = (0.5, 0.6): has no effect with inner.optimizer = 'sgd'" in said
    assert "tracking.uri" in said
    with pytest.raises(ConfigError, match=r"inner\.betas"):
        load("--config", whole, *SGD, "--inner.betas", "[0.5, 0.6]")


def test_settings_of_a_resumed_run_are_not_given(file):
    saved = file("data: {path: x}\n")  # of an older version, which had not all fields and refused less
    config = load("--run.resume", base=lambda given: saved)
    assert "data.path = 'x': has no effect" in config.remarks()[0]


def test_what_a_run_writes_can_be_begun_again(file):
    for argv in (one("fleet.replicas", "1"), one("inner.steps", "6"), one("fleet.transport", "local"), IMAGES[:2]):
        config = load(*argv)
        assert load("--config", file(to_yaml(config))) == config


def test_what_is_given_is_no_part_of_a_configuration():
    assert load("--inner.lr", "3e-3") == load()
    assert load("--inner.lr", "1e-3").model_copy().remarks() == ()


def test_a_name_that_stands_twice_in_a_file_is_refused(file):
    with pytest.raises(ConfigError) as caught:
        load("--config", file("inner: {lr: 1}\nrun: {seed: 1}\ninner:\n  steps: 4\n"))
    assert "in line 3, column 1: 'inner' is given twice, first in line 1" in str(caught.value)
    with pytest.raises(ConfigError, match=r"'lr' is given twice, first in line 2"):
        load("--config", file("inner:\n  lr: 1\n  steps: 4\n  lr: 2\n"))


def test_one_job_leaves_settings_of_others_alone():
    assert load("--data.path", "x", drawn=None).data.path == "x"
    assert load("--inner.betas", "[0.5, 0.5]", *SGD, drawn=lambda config: ["inner.optimizer"])
    with pytest.raises(ConfigError, match=r"data\.path"):
        load("--data.path", "x", cls=JobConfig, drawn=lambda config: ["inner.optimizer"])


# ---- a program of one's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"fleet": {"transport": "local", "start_s": 300.0}},
            r"^fleet\.start_s = 300\.0: has no effect with fleet\.tr",
        ),
        ({"fleet": FleetSettings(transport="local", start_s=9)}, r"^fleet\.start_s = 9.0: has no effect"),
        (
            {"fleet": {"replicas": 1}, "strategy": {"combine": "gather"}},
            r"^strategy\.combine = 'gather': has no effect",
        ),
        ({"fleet": {"replicas": 1}, "strategy": StrategySettings(combine="sharded")}, r"^strategy\.combine"),
        ({"fleet": {"replicas": 1}, "buffers": "first"}, r"^buffers = 'first': has no effect with fleet\.replicas = 1"),
        ({"strategy": {"name": "ddp"}, "state_on_sync": "reset"}, r"^state_on_sync = 'reset': has no effect"),
        ({"tracking": {"enabled": False, "uri": "http://x"}}, r"^tracking\.uri = 'http://x': has no effect"),
        (
            {"tracking": {"experiment": "x"}, "recorder": print},
            r"^tracking = .* has no effect with a recorder of your own",
        ),
        ({"checkpoint": {"every": 0, "keep": 3}}, r"^checkpoint\.keep"),
        ({"faults": (Fault("kill", 0, 99),)}, r"^faults\[0\]\.round = 99: is beyond the end"),
        ({"faults": (Fault("kill", 2, 1),)}, r"^faults\[0\]\.replica = 2: must be less than fleet\.replicas = 2"),
    ],
)
def test_a_trainer_refuses_what_has_no_effect(options, said):
    with pytest.raises(SettingError, match=said):
        LowCommTrainer(lambda context: None, 32, **options)


def test_a_trainer_takes_settings_that_are_resolved():
    for name in strategies.ALGORITHMS:
        resolved = strategies.resolve(StrategySettings(name=name))
        LowCommTrainer(lambda context: None, 320, fleet={"replicas": 1}, strategy=resolved)


def test_a_trainer_says_what_does_nothing_in_its_own_words(tmp_path, capsys):
    def train(context):
        model = nn.Linear(2, 1)
        replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while not replica.finished:
            loss = model(torch.ones(1, 2)).mean()
            loss.backward()
            replica.step(loss)

    fleet, run = {"transport": "local", "replicas": 1}, {"output_dir": str(tmp_path)}
    LowCommTrainer(train, 4, fleet=fleet, run=run, tracking={"enabled": False}, strategy={"name": "diloco"}).fit()
    said = "strategy.inner_steps = 32: is more than steps = 4: the run is one round"
    assert said in " ".join(capsys.readouterr().out.split())


# ---- the fleet of one process ---------------------------------------------------------------------------------------


class Watched(FleetSettings):
    """Remembers which fields are read after it was made."""

    def __getattribute__(self, name):
        frame = inspect.currentframe().f_back
        if "/ray_lowcomm/core/settings.py" not in frame.f_code.co_filename or name == "replicas":
            READ.add(name)
        return object.__getattribute__(self, name)


READ: set[str] = set()


def test_a_fleet_in_one_process_reads_all_that_is_not_refused_there(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.engine.local_run.FleetSettings", Watched)
    READ.clear()
    faults = (Fault("kill", 0, 1, "inner"), Fault("kill", 1, 2, "exchange"), Fault("hang", 2, 3, "inner", 900.0))
    setup = Setup(str(tmp_path), {"name": "diloco", "inner_steps": 4}, faults=faults, fleet={"pace": "by_speed"})
    setup.go()
    dropping = {"quorum": 2, "straggler": "drop", "hang_s": 50}
    Setup(str(tmp_path / "b"), {"name": "diloco", "inner_steps": 4}, faults=faults[2:], fleet=dropping).go()
    idle = {name for rule in effects.EFFECTS for name in rule.fields if rule.on == ("fleet.transport",)}
    unread = {f"fleet.{field.name}" for field in dataclasses.fields(FleetSettings)} - {f"fleet.{n}" for n in READ}
    assert unread - {"fleet.transport"} <= idle
