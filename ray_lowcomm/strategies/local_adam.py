"""Local Adam (2409.13155, ALGORITHMS A4): parameters and all moments are averaged every H steps."""

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.averaging import Averaged, AveragedMoment
from ray_lowcomm.strategies.composite import Composite, build_parameters
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.streaming import STREAMED, check_streamed, due, unused_streamed


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return due(settings, *moments)


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    moments = tracks.moments.names
    if not moments:
        raise needs_moments(tracks.optimizers.name, tracks.moments.remarks())
    parts, fragments = build_parameters(settings, tracks, lambda track: Averaged(Anchor(track, OuterOptimizer("none"))))
    return Composite(tracks, parts | {(name, None): AveragedMoment(tracks.moment(name)) for name in moments}, fragments)


def needs_moments(optimizer: str, remarks: tuple[str, ...] = ()) -> SettingError:
    """What is raised where `optimizer` has no moments, with what else there is to say of it."""
    allowed = f"needs an optimizer with moments, and {optimizer} has none: take local_sgd or diloco"
    return SettingError("strategy.name", "local_adam", "; ".join((allowed, *remarks)))


def _remarks(strategy: Strategy, settings: StrategySettings, steps: int) -> tuple[str, ...]:
    assert isinstance(strategy, Composite)
    return strategy.tracks.moments.remarks()


LOCAL_ADAM = Algorithm(
    defaults={"inner_steps": 32, **STREAMED},
    due=_due,
    build=_build,
    unused=unused_streamed,
    check=check_streamed,
    remarks=_remarks,
    averages_moments=True,
)
