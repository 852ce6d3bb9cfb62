"""A trial's configuration: a sample laid over the base, checked like any configuration, in one line if it is none."""

import numpy as np
import pytest

from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.tuning.space import Space
from ray_lowcomm.tuning.trial_config import overlay, trial_config

BASE = TrainConfig.model_validate({"run": {"name": "sweep", "seed": 3}, "strategy": {"topk": 8}})
PERIODS = Space(
    name="periods",
    summary="periods by ratio",
    domains=lambda base: {},
    fields=lambda sample: {
        "strategy.name": "desloc",
        "strategy.topk": None,
        "strategy.param_period": sample["kx"],
        "strategy.exp_avg_period": sample["kx"] * sample["ratio"],
    },
    refuse=lambda config: "7 is unlucky" if config.strategy.param_period == 7 else None,
)


class WiderConfig(TrainConfig):
    """A job's own."""

    num_samples: int = 4


def of(sample, space=None, base=BASE):
    return trial_config(base, space, sample, "/sweeps/first", "t_1")


def test_dotted_names_are_laid_over_the_base():
    config = of({"strategy.outer_lr": 0.3, "inner.batch_size": 4, "model.args": {"width": 8}})
    assert (config.strategy.outer_lr, config.strategy.topk, config.inner.batch_size) == (0.3, 8, 4)
    assert config.model.args == {"width": 8}
    assert config.run.seed == 3


def test_a_trial_has_a_run_folder_of_its_own_and_leaves_mlflow_to_the_sweep():
    config = of({})
    assert (config.run.output_dir, config.run.name, config.run.resume) == ("/sweeps/first/trials", "t_1", False)
    assert not config.tracking.enabled


def test_a_space_translates_its_sample():
    config = of({"kx": 4, "ratio": 3}, PERIODS)
    assert (config.strategy.name, config.strategy.param_period, config.strategy.exp_avg_period) == ("desloc", 4, 12)


def test_a_space_refuses_with_its_reason():
    with pytest.raises(ConfigError, match=r"^refused: 7 is unlucky$"):
        of({"kx": 7, "ratio": 1}, PERIODS)


def test_a_mistake_in_a_space_ends_the_trial_and_not_the_sweep():
    with pytest.raises(ConfigError, match=r"^space periods: fields failed with KeyError: 'kx'$"):
        of({"ratio": 3}, PERIODS)


def test_numbers_of_numpy_are_taken():
    config = of({"strategy.inner_steps": np.int64(6), "strategy.outer_lr": np.float64(0.25)})
    assert (config.strategy.inner_steps, config.strategy.outer_lr) == (6, 0.25)


def test_only_what_a_run_knows_is_kept_of_a_jobs_configuration():
    config = overlay(WiderConfig(num_samples=9), {})
    assert type(config) is TrainConfig
    assert config == TrainConfig()


@pytest.mark.parametrize(
    ("sample", "line"),
    [
        ({"strategy.outer_lr": -0.5}, "strategy.outer_lr = -0.5: must be greater than 0"),
        ({"strategy.outer_lrr": 1}, "strategy.outer_lrr = 1: no such field; nearest: strategy.outer_lr"),
        ({"strategy.topk": "many"}, "strategy.topk = 'many': must be a whole number or null"),
        ({"strategy.name": "ddp", "strategy.topk": 4}, "strategy.topk = 4"),
        ({"fleet.replicas": [1, 4]}, "fleet.replicas = [1, 4]: must be one number in a sweep"),
        ({"fleet.resources_per_replica": {"CPU": 0}}, "fleet.resources_per_replica = {'CPU': 0"),
    ],
)
def test_what_is_wrong_is_one_line(sample, line):
    with pytest.raises(ConfigError) as caught:
        of(sample)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
