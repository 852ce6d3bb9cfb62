"""Settings of a round that is applied some inner steps after its messages were made."""

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings

OVERLAP = {"overlap_steps": 0}


def check_overlap(settings: StrategySettings) -> None:
    """SettingError unless a round is applied before the next one of its parameters is launched."""
    late, most = settings.overlap_steps, settings.param_period or settings.inner_steps or 1
    if not isinstance(late, int) or late <= most:
        return
    name = "param_period" if settings.param_period else "inner_steps"
    raise SettingError("strategy.overlap_steps", late, f"must be at most strategy.{name} = {most}, or auto")


def unused_mix(settings: StrategySettings) -> dict[str, str]:
    """`mix` has no effect where a round is applied at once."""
    return {} if settings.overlap_steps else {"mix": "needs strategy.overlap_steps of 1 or more, or auto"}
