"""Local Adam (2409.13155, ALGORITHMS A4): parameters and all moments are averaged every H steps."""

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.averaging import PeriodicAveraging
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.overlap import OVERLAP, check_overlap


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every(dict.fromkeys((PARAMS, *moments), settings.inner_steps or 1))


def _build(settings: StrategySettings, tracks: Tracks, seed: int) -> Strategy:
    moments = tracks.moments.names
    if not moments:
        raise needs_moments(tracks.optimizers.name, tracks.moments.remarks())
    return PeriodicAveraging(tracks, moments, OuterOptimizer("none"))


def needs_moments(optimizer: str, remarks: tuple[str, ...] = ()) -> SettingError:
    """What is raised where `optimizer` has no moments, with what else there is to say of it."""
    allowed = f"needs an optimizer with moments, and {optimizer} has none: take local_sgd or diloco"
    return SettingError("strategy.name", "local_adam", "; ".join((allowed, *remarks)))


def _remarks(strategy: Strategy, settings: StrategySettings, steps: int) -> tuple[str, ...]:
    assert isinstance(strategy, PeriodicAveraging)
    return strategy.tracks.moments.remarks()


LOCAL_ADAM = Algorithm(
    defaults={"inner_steps": 32, **OVERLAP},
    due=_due,
    build=_build,
    check=check_overlap,
    remarks=_remarks,
    averages_moments=True,
)
