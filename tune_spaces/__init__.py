"""Search spaces, one file each: ``python -m jobs.tune --space NAME``, or with plain Ray Tune.

    from ray import tune
    from ray_lowcomm.config import TrainConfig
    from ray_lowcomm.tuning.trainable import trainable
    from tune_spaces.dct_momentum import SPACE

    base = TrainConfig()
    tune.Tuner(trainable(base, SPACE), param_space=SPACE.domains(base)).fit()

To make one of your own copy a file and edit its ranges: in this folder it goes by its name, anywhere else by
``module:SPACE``.
"""

import importlib
import pkgutil
from types import ModuleType

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.tuning.budget import BudgetSettings
from ray_lowcomm.tuning.space import Space


def names() -> list[str]:
    """All spaces in this folder, sorted: every module whose name does not begin with an underscore."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load(name: str, budget: BudgetSettings | None = None) -> Space:
    """The space of that name, or ``module:attribute``. A module with a function `space` gets `budget`, if given.

    Raises:
        SettingError: there is none, with those that exist; or the module has no such space.
    """
    if ":" not in name and name not in names():
        what = "there is no such space" if name else "a sweep needs one"
        raise SettingError("space", name, f"{what}; there are {_described()}, and module:SPACE")
    module, attribute = _imported(name)
    if budget is not None and _takes_budget(module, attribute):
        found: object = module.space(budget)
    else:
        found = getattr(module, attribute, None)
    if not isinstance(found, Space):
        raise SettingError(
            "space", name, f"{module.__name__} has no {attribute} that is a ray_lowcomm.tuning.space.Space"
        )
    return found


def takes_budget(name: str) -> bool:
    """Whether the space of that name depends on a budget. SettingError as `load`."""
    load(name)
    return _takes_budget(*_imported(name))


def _imported(name: str) -> tuple[ModuleType, str]:
    path, _, attribute = name.partition(":") if ":" in name else (f"tune_spaces.{name}", ":", "SPACE")
    try:
        return importlib.import_module(path), attribute
    except Exception as error:
        raise SettingError("space", name, f"{path} cannot be imported: {type(error).__name__}: {error}") from error


def _takes_budget(module: ModuleType, attribute: str) -> bool:
    return attribute == "SPACE" and hasattr(module, "space")


def _described() -> str:
    return "; ".join(f"{name} ({_summary(name)})" for name in names())


def _summary(name: str) -> str:
    try:
        return load(name).summary
    except SettingError:  # a broken one must not hide the others
        return "cannot be imported"


__all__ = ["load", "names", "takes_budget"]
