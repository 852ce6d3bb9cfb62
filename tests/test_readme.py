"""The README tells the truth: its example runs, and its commands are understood."""

import re
import shlex
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def commands():
    blocks = re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[3:] for line in lines if line.startswith("python -m jobs.train")]


def test_example_is_short():
    example = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL).group(1)
    assert len(example.strip().splitlines()) <= 40


@pytest.mark.parametrize("argv", commands(), ids=" ".join)
def test_commands_are_understood(argv):
    from jobs.train import JobConfig
    from ray_lowcomm.config import load_config

    config = load_config([word for word in argv if word != "…"], JobConfig, {})
    assert config.resolved().strategy.name


def test_faults_example_is_understood():
    from ray_lowcomm.config import TrainConfig, load_config

    argument = re.search(r"--faults '(.*?)'", README).group(1)
    assert load_config(["--faults", argument], TrainConfig, {}).faults[0].do == "kill"
