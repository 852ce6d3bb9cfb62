"""What a program gives `LowCommTrainer`, judged like the settings of a job: what has no effect is refused."""

from collections.abc import Mapping
from typing import Any

from ray_lowcomm import strategies
from ray_lowcomm.config import LoopConfig
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.effects import Given, differing, refuse_idle, remarks


def judged(config: LoopConfig, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Remarks on a run of `config`, made from `arguments` by section: settings, or mappings of their fields.

    Of a mapping what it names was given, of settings what differs from the default.

    Raises:
        SettingError: a fault of a replica that there is not; or something was given that has no effect.
    """
    given = Given(_named(config, arguments))
    try:
        resolved = config.resolved()
        refuse_idle(resolved, given)
    except SettingError as error:
        raise SettingError(_own(error.field), error.value, _own(error.allowed)) from None
    return tuple(map(_own, remarks(resolved, given)))


def _named(config: LoopConfig, arguments: Mapping[str, Any]) -> frozenset[str]:
    usual = strategies.resolve(StrategySettings(name=config.strategy.name), config.inner.steps)
    changed = differing(config, LoopConfig(inner=type(config.inner)(steps=config.inner.steps), strategy=usual))
    found = set()
    for section, value in arguments.items():
        if isinstance(value, Mapping):
            found |= {f"{section}.{name}" for name in value}
        elif value is not None:
            found |= {name for name in changed if name.partition(".")[0] == section}
    return frozenset(found)


def _own(text: str) -> str:
    """In the names of a program, whose arguments have what is a section of its own in a job."""
    return text.replace("inner.", "")
