"""`--help` is one screen, `--help SECTION` the fields."""

from contextlib import suppress

import pytest

from jobs import evaluate, train, tune
from jobs.benchmark import main as benchmark
from ray_lowcomm.config import ConfigError, TrainConfig, load_config
from ray_lowcomm.config_screen import ALL, OPTIONS, SECTIONS, TRAIN, help_text
from ray_lowcomm.config_sources import members
from ray_lowcomm.tuning.settings import SweepConfig

COLUMNS, LINES = 80, 24
JOBS = {"train": train.main, "tune": tune.main, "evaluate": evaluate.main, "benchmark": benchmark}


def asked(job, capsys, *argv):
    with suppress(SystemExit):
        JOBS[job](["--help", *argv])
    return capsys.readouterr().out


@pytest.mark.parametrize("job", JOBS)
def test_help_is_one_screen(job, capsys):
    text = asked(job, capsys)
    assert len(text.splitlines()) < LINES  # the prompt is there as well
    assert max(map(len, text.splitlines())) <= COLUMNS


@pytest.mark.parametrize(("job", "cls"), [("train", train.JobConfig), ("tune", SweepConfig)])
def test_the_screen_has_examples_each_section_and_how_to_see_more(job, cls, capsys):
    text = asked(job, capsys)
    lines = text.splitlines()
    assert sum(line.startswith(f"  python -m jobs.{job}") for line in lines) == 3
    sections = [name for name, kind in members(cls).items() if members(kind) is not None]
    for name in [*sections, "faults", OPTIONS]:
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert len(line.split()) > 1
    assert f"python -m jobs.{job} --help SECTION" in text


def test_examples_are_accepted():
    for command, cls in ((TRAIN, train.JobConfig), (tune.COMMAND, SweepConfig)):
        for call, _ in command.examples:
            words = call.removeprefix(command.call).split()
            load_config([word for word in words if word not in ("--config", "my.yaml")], cls, {})


def test_a_section_has_its_fields_and_no_others(capsys):
    text = asked("train", capsys, "checkpoint", "tracking")
    assert "--checkpoint.keep " in text
    assert "rounds between checkpoints" in text
    assert "--tracking.uri " in text
    assert "--run.name" not in text
    options = asked("tune", capsys, OPTIONS)
    assert "--num_samples " in options
    assert "--inner.lr" not in options
    assert "--data.path " in asked("evaluate", capsys, "data")
    assert asked("train", capsys, ALL) == help_text(train.JobConfig)


def test_sections_are_all_of_it():
    words = help_text(TrainConfig).split()
    for name in members(TrainConfig):
        assert set(help_text(TrainConfig, [name]).split()) <= set(words)


@pytest.mark.parametrize("asked_for", [["stratgy"], ["run", "stratgy"]])
def test_an_unknown_section_is_one_line(asked_for):
    with pytest.raises(ConfigError) as caught:
        load_config(["--help", *asked_for], TrainConfig, {})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("--help = 'stratgy': there is no such section; nearest: strategy; there are model, data, ")


def test_each_section_is_described():
    assert set(SECTIONS) == set(members(TrainConfig))
