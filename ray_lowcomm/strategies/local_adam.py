"""Local Adam (2409.13155, ALGORITHMS A4): parameters and all moments are averaged every H steps."""

from ray_lowcomm.core import optimizer_state
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.averaging import PeriodicAveraging
from ray_lowcomm.strategies.contract import Algorithm, Strategy


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every(dict.fromkeys((PARAMS, *moments), settings.inner_steps or 1))


def _build(settings: StrategySettings, tracks: Tracks, seed: int) -> Strategy:
    moments = optimizer_state.moment_names(tracks.optimizers)
    if not moments:
        name = tracks.optimizers.name
        raise SettingError(
            "strategy.name", "local_adam", f"needs Adam, AdamW, RAdam, ADOPT or SGD with momentum, got {name}"
        )
    return PeriodicAveraging(tracks, moments, OuterOptimizer("none"))


LOCAL_ADAM = Algorithm(defaults={"inner_steps": 32}, due=_due, build=_build)
