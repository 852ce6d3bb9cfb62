"""The trainable as Tune calls it, without Tune: set up, take a checkpoint, step, save, end, become another trial."""

import os

import pytest
import torch
from ray.tune.result import RESULT_DUPLICATE

from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.core.errors import CheckpointError, FleetError
from ray_lowcomm.tuning import trainable as module
from ray_lowcomm.tuning.trainable import LowCommTrainable, trainable

ROUNDS = 4
BASE = TrainConfig.model_validate(
    {
        "checkpoint": {"every": 1},
        "inner": {"steps": 2 * ROUNDS},
        "strategy": {"name": "diloco", "inner_steps": 2},
        "fleet": {"replicas": 2, "transport": "local"},
    }
)


def train(context):
    model = torch.nn.Linear(4, 2)
    replica = context.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    while not replica.finished:
        loss = (model(torch.randn(4, 4)) ** 2).mean()
        loss.backward()
        replica.step(loss, 4)


class Alone(LowCommTrainable):
    """As `tune.with_parameters` would have it; Tune's own start makes a folder in the home directory."""

    def __init__(self, place, config):
        self._trial_info, self._place = None, place
        self.setup(config)

    def setup(self, config):
        super().setup(config, BASE, None, self._place, train)


@pytest.fixture
def trial(tmp_path):
    """Makes trials of one id that share a sweep's folder; all are ended at last."""
    made = []

    def make(**config):
        made.append(Alone(str(tmp_path), config))
        return made[-1]

    yield make
    for one in made:
        one.cleanup()


def rounds(one):
    found = []
    while (result := one.step()) and RESULT_DUPLICATE not in result:
        found.append(result["outer_round"])
        if result.get("done"):
            break
    return found


def test_steps_to_the_end_and_then_says_so(trial):
    one = trial()
    assert rounds(one) == [1, 2, 3, 4]
    assert one.step() == {RESULT_DUPLICATE: True, "done": True}


def test_a_checkpoint_may_be_passed_on_without_a_step(trial, tmp_path):
    first = trial()
    assert [first.step()["outer_round"], first.step()["outer_round"]] == [1, 2]
    first.save_checkpoint(str(tmp_path / "one"))
    first.cleanup()

    paused = trial()
    paused.load_checkpoint(str(tmp_path / "one"))
    paused.save_checkpoint(str(tmp_path / "two"))
    paused.cleanup()

    last = trial()
    last.load_checkpoint(str(tmp_path / "two"))
    assert rounds(last) == [3, 4]


def test_before_anything_was_done_there_is_a_checkpoint_too(trial, tmp_path):
    one = trial()
    one.save_checkpoint(str(tmp_path / "saved"))
    one.load_checkpoint(str(tmp_path / "saved"))
    assert rounds(one) == [1, 2, 3, 4]


def test_paths_in_a_configuration_are_not_meant_from_tunes_folder(trial, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TUNE_ORIG_WORKING_DIR", "/")
    trial()
    assert os.getcwd() == "/"


def test_becomes_another_trial(trial):
    one = trial()
    assert one.step()["outer_round"] == 1
    assert one.reset_config({"strategy.outer_lr": 0.5})
    assert one._settings.strategy.outer_lr == 0.5
    assert rounds(one) == [1, 2, 3, 4]


def test_a_bad_configuration_is_said_in_the_first_step(trial, tmp_path):
    one = trial(**{"strategy.outer_lr": -1.0})
    with pytest.raises(ConfigError, match=r"^strategy\.outer_lr = -1\.0: must be greater than 0$"):
        one.step()
    one.save_checkpoint(str(tmp_path / "saved"))


def test_a_checkpoint_that_is_none_is_said_in_the_first_step(trial, tmp_path):
    one = trial()
    one.load_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"trial\.json does not exist"):
        one.step()


def test_waits_for_its_predecessor_and_not_for_ever(trial, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PREDECESSOR_S", 0.1)
    first = trial()
    with pytest.raises(FleetError, match=r"\.default\.trial\.lock is still held by an earlier process of this trial"):
        trial().step()
    first.cleanup()
    assert trial().step()["outer_round"] == 1


def test_the_sweeps_folder_is_absolute_and_named_by_the_base(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(module.tune, "with_parameters", lambda cls, **parameters: given.update(parameters) or cls)
    monkeypatch.chdir(tmp_path)
    made = trainable(BASE)
    assert given["directory"] == str(tmp_path / "outputs/default")
    trainable(BASE, directory="s3://bucket/sweep")
    assert given["directory"] == "s3://bucket/sweep"
    assert made.default_resource_request({}).bundles == [{"CPU": 1.0}]
    assert made.default_resource_request({"fleet.transport": "ray", "fleet.replicas": 3}).bundles == [{"CPU": 1.0}] * 3
