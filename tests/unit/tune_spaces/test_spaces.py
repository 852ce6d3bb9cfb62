"""Every space: what it draws makes a valid run, by chance as by Optuna, and says where it comes from."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ray.tune.search.optuna import OptunaSearch
from ray.tune.search.sample import Categorical, Float, Integer

import tune_spaces
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import FleetSettings, InnerSettings
from ray_lowcomm.tuning.budget import BudgetSettings
from ray_lowcomm.tuning.trial_config import overlay, plain

BUDGET = BudgetSettings(step_s=0.1)
BASES = {  # and how many samples of each
    "default": (TrainConfig(), 1000),
    "short": (TrainConfig(inner=InnerSettings(steps=9)), 200),
    "long": (TrainConfig(inner=InnerSettings(steps=100_000), fleet=FleetSettings(replicas=12)), 200),
}


@pytest.fixture(autouse=True)
def same_draws():
    np.random.seed(0)
    random.seed(0)


def draw(domains):
    return {name: domain.sample() for name, domain in domains.items()}


def laid_over(base, fields):
    """`base` with these fields, checked by each section and the strategy: as `overlay` does it, ten times as fast."""
    sections = {}
    for name, value in fields.items():
        section, field = name.split(".")
        sections.setdefault(section, {})[field] = plain(value)
    changed = {section: replace(getattr(base, section), **given) for section, given in sections.items()}
    return base.model_copy(update=changed)


def check(space, base, sample):
    """The run that a sample means, valid, and with every setting of the sample as it was asked for."""
    fields = space.fields(sample)
    json.dumps({name: plain(value) for name, value in fields.items()})
    config = laid_over(base, fields)
    for name, value in fields.items():
        section, field = name.split(".")
        assert getattr(getattr(config, section), field) == value, name
    return config.resolved()


def test_every_module_of_the_folder_is_a_space():
    folder = Path(tune_spaces.__file__).parent
    modules = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert tune_spaces.names() == sorted(modules)
    for name in tune_spaces.names():
        assert tune_spaces.load(name).name == name


def test_the_spaces_of_the_project():
    assert {"topk_diloco", "dct_momentum", "desloc", "diloco", "budget"} <= set(tune_spaces.names())


def test_an_unknown_space_is_told_which_there_are():
    with pytest.raises(SettingError) as error:
        tune_spaces.load("dct")
    assert str(error.value).startswith("space = 'dct'")
    for name in tune_spaces.names():
        assert f"{name} ({tune_spaces.load(name).summary})" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_space_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "my_space.py").write_text("from tune_spaces.diloco import SPACE\nMINE = SPACE\nOTHER = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert tune_spaces.load("my_space:MINE").name == "diloco"
    with pytest.raises(SettingError, match="no OTHER that is a"):
        tune_spaces.load("my_space:OTHER")
    with pytest.raises(SettingError, match="nowhere cannot be imported: ModuleNotFoundError"):
        tune_spaces.load("nowhere:SPACE")


@pytest.mark.parametrize(("base", "count"), BASES.values(), ids=BASES)
@pytest.mark.parametrize("name", tune_spaces.names())
def test_random_samples_make_valid_runs(name, base, count):
    space = tune_spaces.load(name, BUDGET)
    domains = space.domains(base)
    configs = [check(space, base, draw(domains)) for _ in range(count)]
    for config in configs:
        if config.strategy.topk is not None:
            assert 1 <= config.strategy.topk <= config.strategy.chunk_size**2
        assert config.fleet.replicas <= base.fleet.replicas
    assert len({repr(config) for config in configs}) > count / 10


@pytest.mark.parametrize("name", tune_spaces.names())
def test_a_sweep_takes_its_samples(name):
    base = TrainConfig()
    space = tune_spaces.load(name, BUDGET)
    domains = space.domains(base)
    for sample in [draw(domains) for _ in range(5)]:
        assert overlay(base, space.fields(sample)) == laid_over(base, space.fields(sample))


@pytest.mark.parametrize("name", tune_spaces.names())
def test_optuna_draws_from_it(name):
    base = TrainConfig()
    space = tune_spaces.load(name, BUDGET)
    domains = space.domains(base)
    search = OptunaSearch(dict(domains), metric="val_loss", mode="min", seed=1)
    seen = set()
    for trial in range(50):
        sample = search.suggest(str(trial))
        assert set(sample) == set(domains)
        seen.add(repr(check(space, base, sample)))
        # beyond its first ten trials TPE draws from what it has learnt
        result = {"val_loss": len(repr(sample)) % 7, "training_iteration": 1}
        search.on_trial_complete(str(trial), result)
    assert len(seen) > 5


@pytest.mark.parametrize("name", tune_spaces.names())
def test_a_searcher_gets_plain_choices_and_finite_ranges(name):
    for domain in tune_spaces.load(name, BUDGET).domains(TrainConfig()).values():
        if isinstance(domain, Categorical):
            assert all(isinstance(choice, str | int | float | bool) for choice in domain.categories)
            assert len(set(domain.categories)) == len(domain.categories)
        else:
            assert isinstance(domain, Float | Integer)
            assert np.isfinite([domain.lower, domain.upper]).all()


@pytest.mark.parametrize("name", tune_spaces.names())
def test_its_file_says_what_each_range_is(name):
    space = tune_spaces.load(name, BUDGET)
    module = __import__(f"tune_spaces.{name}", fromlist=["SPACE"])
    for domain in space.domains(TrainConfig()):
        assert f"`{domain}`" in module.__doc__
    assert module.SPACE.summary
