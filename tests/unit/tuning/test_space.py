import numpy as np
import pytest

from ray_lowcomm.config import ConfigError, TrainConfig
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.tuning.space import Space, guarded
from tests.unit.tuning.toy_space import SPACE


def raising(given):
    raise RuntimeError("no\nidea")


def gives(answer):
    return lambda given: answer


def test_a_good_space_stays_as_it_is():
    space = guarded(SPACE)
    assert space.domains(TrainConfig()).keys() == {"strategy.inner_steps", "strategy.outer_lr"}
    sample = {"strategy.outer_lr": np.float64(0.5), "inner.betas": (0.9, 0.99), "model.args": {"width": 64}}
    assert space.fields(sample) == sample
    assert space.refuse(TrainConfig()) is None


@pytest.mark.parametrize(
    ("name", "function", "line"),
    [
        ("domains", raising, "space odd: domains failed with RuntimeError: no idea"),
        ("domains", gives(None), "space odd: domains gave None: must be a dictionary"),
        ("fields", raising, "space odd: fields failed with RuntimeError: no idea"),
        ("fields", gives(["a"]), "space odd: fields gave ['a']: must be a dictionary"),
        ("fields", gives({1: 2}), "space odd: fields gave the key 1: must be a dotted name"),
        ("fields", gives({"inner.lr": ...}), "space odd: fields gave inner.lr = Ellipsis: must be plain data"),
        ("refuse", raising, "space odd: refuse failed with RuntimeError: no idea"),
        ("refuse", gives(False), "space odd: refuse gave False: must be a reason (text), or None"),
    ],
)
def test_of_an_odd_one_the_function_is_named_in_one_line(name, function, line):
    functions = {"domains": gives({}), "fields": gives({}), "refuse": gives(None), name: function}
    with pytest.raises(ConfigError) as error:
        getattr(guarded(Space("odd", "for tests", **functions)), name)({})
    assert str(error.value) == line


def test_an_error_of_ours_is_passed_on():
    def needs_more(given):
        raise SettingError("budget.step_s", None, "must be given")

    with pytest.raises(SettingError, match=r"budget\.step_s = None: must be given"):
        guarded(Space("odd", "for tests", needs_more)).domains(TrainConfig())
