"""The README tells the truth: its example runs, and its commands are understood."""

import re
import shlex
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def commands(job):
    blocks = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)  # closing fences are part of a match
    lines = "\n".join(text for language, text in blocks if not language).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[3:] for line in lines if line.startswith(f"python -m jobs.{job} ")]


def without_config(argv):
    """A file that an earlier command makes is not there."""
    at = argv.index("--config") if "--config" in argv else len(argv)
    return argv[:at] + argv[at + 2 :]


def test_example_is_short():
    example = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL).group(1)
    assert len(example.strip().splitlines()) <= 40


@pytest.mark.parametrize("argv", commands("train"), ids=" ".join)
def test_commands_are_understood(argv):
    from jobs.train import JobConfig
    from ray_lowcomm.config import load_config

    config = load_config([word for word in without_config(argv) if word != "…"], JobConfig, {})
    assert config.resolved().strategy.name


@pytest.mark.parametrize("argv", commands("tune"), ids=" ".join)
def test_sweep_commands_are_understood(argv):
    import tune_spaces
    from jobs.tune import load_sweep
    from ray_lowcomm.tuning.settings import base_of

    config = load_sweep(argv)
    assert tune_spaces.load(config.space, config.budget).domains(base_of(config))


def test_script_with_tune_is_understood():
    script = re.search(r"```python\n(from ray import tune\n.*?)```", README, flags=re.DOTALL).group(1)
    names = {}
    exec(script, names)
    assert names["space"].domains(names["base"])


def test_faults_example_is_understood():
    from ray_lowcomm.config import TrainConfig, load_config

    argument = re.search(r"--faults '(.*?)'", README).group(1)
    assert load_config(["--faults", argument], TrainConfig, {}).faults[0].do == "kill"
