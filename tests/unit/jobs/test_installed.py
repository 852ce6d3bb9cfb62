"""A job where the package is not installed says so in one line."""

import tomllib
from pathlib import Path

from jobs import _installed

PYPI_NAMES = {"yaml": "pyyaml"}


def test_what_is_looked_for_is_what_the_project_depends_on():
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    dependencies = {line.split("[")[0].split(">")[0].split("=")[0].strip() for line in project["dependencies"]}
    assert {PYPI_NAMES.get(name, name) for name in _installed.NEEDED} == dependencies
    oldest = ".".join(map(str, _installed.OLDEST))
    assert project["requires-python"].startswith(f">={oldest}")


def test_all_of_it_is_here():
    assert _installed.lacking() == ""


def test_one_line_names_what_is_missing_and_what_to_do():
    said = _installed.lacking(("json", "no_such_module", "nor_this_one"))
    assert "has no no_such_module, nor_this_one" in said
    assert "--runtime-env" in said
    assert "\n" not in said


def test_an_old_python():
    assert "is Python 3.9, and ray_lowcomm needs 3.11 or later" in _installed.lacking((), (3, 9))
