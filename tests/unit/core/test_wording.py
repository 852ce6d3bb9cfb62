"""Texts name settings as their reader sets them."""

import pytest

from ray_lowcomm.core.errors import FleetError, SettingError
from ray_lowcomm.core.wording import option, reworded, worded


@pytest.mark.parametrize(
    ("name", "command", "program"),
    [
        ("run.resume", "--run.resume", 'run={"resume": True}'),
        ("inner.steps", "--inner.steps", "steps"),
        ("fleet.start_s", "--fleet.start_s", 'fleet={"start_s": …}'),
    ],
)
def test_an_option_is_as_its_reader_sets_it(name, command, program):
    text = f"a fault: set {option(name)}"
    assert worded(text, "command") == f"a fault: set {command}"
    assert worded(text, "program") == f"a fault: set {program}"


def test_an_error_keeps_its_kind_and_its_fields():
    error = reworded(SettingError("run.name", "x", f"choose another {option('run.name')}"), "command")
    assert isinstance(error, SettingError)
    assert (str(error), error.field) == ("run.name = 'x': choose another --run.name", "run.name")
    assert str(reworded(FleetError("no option"), "program")) == "no option"
