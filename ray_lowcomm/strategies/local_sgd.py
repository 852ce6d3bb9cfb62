"""Local SGD / FedAvg (ALGORITHMS A2): parameters are averaged every H steps, the optimizer's state stays local."""

from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import TrackSet
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.averaging import Averaged
from ray_lowcomm.strategies.composite import build_alone
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.streaming import STREAMED, check_streamed, due, unused_streamed


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return due(settings)


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    return build_alone(settings, tracks, lambda track: Averaged(Anchor(track, OuterOptimizer("none"))))


LOCAL_SGD = Algorithm(
    defaults={"inner_steps": 32, **STREAMED},
    due=_due,
    build=_build,
    unused=unused_streamed,
    check=check_streamed,
)
