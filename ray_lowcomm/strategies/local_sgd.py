"""Local SGD / FedAvg (ALGORITHMS A2): parameters are averaged every H steps, the optimizer's state stays local."""

from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies.averaging import PeriodicAveraging
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.overlap import OVERLAP, check_overlap


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    return every({PARAMS: settings.inner_steps or 1})


def _build(settings: StrategySettings, tracks: Tracks, seed: int) -> Strategy:
    return PeriodicAveraging(tracks, (), OuterOptimizer("none"))


LOCAL_SGD = Algorithm(defaults={"inner_steps": 32, **OVERLAP}, due=_due, build=_build, check=check_overlap)
