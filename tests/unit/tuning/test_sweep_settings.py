import pytest

from ray_lowcomm.config import ConfigError, load_config, to_yaml
from ray_lowcomm.tuning.settings import SweepConfig, base_of, named


def load(*argv):
    return load_config(argv, SweepConfig, {})


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--num-samples", "0"], "num_samples = 0: must be 1 or more"),
        (["--max-concurrent", "-1"], "max_concurrent = -1: must be 1 or more"),
        (["--num-samples", "many"], "num_samples = 'many': must be a whole number or null"),
        (["--time-budget", "0"], "time_budget = 0.0: must be greater than 0"),
        (["--grace", "nan"], "grace = nan: must be greater than 0"),
        (["--reduction_factor", "1"], "reduction_factor = 1.0: must be at least 1.01"),
        (
            ["--objective", "max:val_loss"],
            "objective = 'max:val_loss': must be val_loss, bytes_up, bytes_to_loss, val_loss,bytes_up, or NAME or "
            "max:NAME of your own metrics",
        ),
        (["--objective", "bytes_to_loss"], "target_loss = None: goes together with --objective bytes_to_loss"),
        (["--target-loss", "2"], "target_loss = 2.0: goes together with --objective bytes_to_loss"),
        (["--run.eval_every", "0"], "run.eval_every = 0: the objective val_loss needs validations: 1 or more"),
        (["--run.resume"], "run.resume = True: a sweep is resumed with --resume"),
        (["--search", "bayes"], "search = 'bayes': must be tpe, nsga2, random, grid or null"),
        (["--sheduler", "asha"], "sheduler = 'asha': no such field; nearest: scheduler"),
    ],
)
def test_a_mistake_is_one_line(argv, line):
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert str(caught.value) == line


def test_population_based_training_goes_with_random_and_a_loss():
    assert load("--scheduler", "pbt").drawn_by == "random"
    assert load().drawn_by == "tpe"
    with pytest.raises(ConfigError, match="search = 'tpe': pbt changes settings in the middle of a trial"):
        load("--scheduler", "pbt", "--search", "tpe")
    with pytest.raises(ConfigError, match="max_concurrent = 2: pbt compares trials that are alive together"):
        load("--scheduler", "pbt", "--max-concurrent", "2")
    with pytest.raises(ConfigError, match="no byte depends on"):
        load("--scheduler", "pbt", "--objective", "bytes_up")


def test_the_base_of_the_trials_is_a_run():
    config = named(load("--space", "my.spaces:SPACE", "--strategy.outer_lr", "0.5", "--register", "best"))
    assert config.run.name == "sweep_my.spaces_SPACE"
    assert named(load("--space", "a", "--run.name", "mine")).run.name == "mine"
    base = base_of(config)
    assert "register" not in base.model_dump()
    assert (base.strategy.outer_lr, base.inner.steps, base.run.eval_every) == (0.5, 320, 1)


def test_yaml_reads_back(tmp_path):
    config = load("--space", "desloc", "--num-samples", "3", "--time-budget", "60", "--budget.step_s", "0.5")
    path = tmp_path / "sweep.yaml"
    path.write_text(to_yaml(config))
    assert load("--config", str(path)) == config


def test_the_scheduler_follows_from_the_objectives():
    assert load("--space", "diloco").stopped_by == "asha"
    assert load("--space", "diloco", "--objective", "val_loss,bytes_up").stopped_by == "none"
    assert load("--space", "diloco", "--objective", "val_loss,bytes_up", "--scheduler", "asha").stopped_by == "asha"


@pytest.mark.parametrize("name", ["a/b", "a:b", " "])
def test_a_name_that_mlflows_registry_refuses(name):
    with pytest.raises(ConfigError, match=r"register = .*must be a name without '/' and ':'"):
        load_config(["--space", "toy", "--register", name], SweepConfig, {})


def test_a_model_can_be_registered_only_where_there_is_mlflow():
    with pytest.raises(ConfigError, match=r"register = 'best': needs MLflow: tracking\.enabled must be true"):
        load("--space", "diloco", "--register", "best", "--tracking.enabled", "false")


def test_what_a_space_draws_may_give_a_setting_its_effect(tmp_path, monkeypatch):
    from jobs.tune import load_sweep

    (tmp_path / "own_space.py").write_text(
        "from ray import tune\nfrom ray_lowcomm.tuning.space import Space\n"
        "SPACE = Space('own', 'x', lambda base: {'inner.optimizer': tune.choice(['sgd', 'adamw'])})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--space", "own_space:SPACE", "--inner.momentum", "0.5"]
    assert load_sweep(own).inner.momentum == 0.5
    placed = ["--fleet.transport", "local", "--fleet.resources_per_replica.CPU", "2"]
    assert load_sweep(["--space", "diloco", *placed]).fleet.transport == "local"  # a trial is placed by it
    with pytest.raises(ConfigError, match=r"^data\.path = 'x': has no effect with data\.name = 'python_stdlib'"):
        load_sweep([*own, "--data.path", "x"])
    with pytest.raises(ConfigError, match=r"^inner\.momentum = 0\.5: has no effect"):
        load_sweep(["--space", "diloco", "--inner.momentum", "0.5"])
