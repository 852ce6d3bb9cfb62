"""All algorithms by name, and the settings each understands."""

from dataclasses import fields, replace
from typing import Any, Literal

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.remarks import Remark
from ray_lowcomm.core.schedule import Schedule
from ray_lowcomm.core.settings import FleetSettings, StrategySettings
from ray_lowcomm.core.tracks import PARAMS, TrackSet
from ray_lowcomm.strategies import local_adam, track_codecs
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.dct_momentum import DCT_MOMENTUM
from ray_lowcomm.strategies.ddp import DDP_ALGORITHM
from ray_lowcomm.strategies.desloc import DESLOC
from ray_lowcomm.strategies.diloco import DILOCO
from ray_lowcomm.strategies.local_sgd import LOCAL_SGD
from ray_lowcomm.strategies.sparse_loco import SPARSE_LOCO
from ray_lowcomm.strategies.streaming import dense_bytes, fragments_of
from ray_lowcomm.strategies.topk_diloco import TOPK_DILOCO

ALGORITHMS: dict[str, Algorithm] = {
    "ddp": DDP_ALGORITHM,
    "local_sgd": LOCAL_SGD,
    "local_adam": local_adam.LOCAL_ADAM,
    "diloco": DILOCO,
    "dct_momentum": DCT_MOMENTUM,
    "desloc": DESLOC,
    "sparse_loco": SPARSE_LOCO,
    "topk_diloco": TOPK_DILOCO,
}


def algorithm(name: str) -> Algorithm:
    """The registry's entry; SettingError with the names that exist if there is none."""
    if name not in ALGORITHMS:
        raise SettingError("strategy.name", name, f"must be one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def resolve(settings: StrategySettings, steps: int | None = None) -> StrategySettings:
    """Settings with every None replaced by the algorithm's default; resolving twice changes nothing.

    `steps` are the inner steps of the run: some defaults are others where there are few rounds (None: there are many).

    Raises:
        SettingError: an unknown algorithm, a field that it does not use, or a combination that makes no sense.
    """
    entry = algorithm(settings.name)
    for item in fields(settings):
        given = getattr(settings, item.name)
        if item.name != "name" and given is not None and item.name not in entry.defaults:
            used = ", ".join(entry.defaults) or "no field"
            given = track_codecs.shown(given) if isinstance(given, dict) else given
            others = ", ".join(name for name, other in ALGORITHMS.items() if item.name in other.defaults)
            allowed = f"is not used by {settings.name}, which takes {used}; it is a field of {others}"
            raise SettingError(f"strategy.{item.name}", given, allowed)
    missing = {name: value for name, value in entry.defaults.items() if getattr(settings, name) is None}
    filled = replace(settings, **missing)
    unused = entry.unused(filled)
    for name, reason in unused.items():
        if name not in missing:
            raise SettingError(f"strategy.{name}", getattr(settings, name), reason)
    nothing: dict[str, Any] = dict.fromkeys(unused)
    resolved = replace(entry.derived(filled, steps), **nothing)
    entry.check(resolved)
    return resolved


def lasting(settings: StrategySettings, steps: int) -> StrategySettings:
    """Settings with those defaults filled in that follow from the length of a run: it goes on with them when it is made
    longer or shorter. SettingError as `resolve`."""
    here, shortest, always = resolve(settings, steps), resolve(settings, 1), resolve(settings)
    names = [item.name for item in fields(here) if getattr(shortest, item.name) != getattr(always, item.name)]
    return replace(settings, **{name: getattr(here, name) for name in names})


def check_inner(
    settings: StrategySettings, state_on_sync: str, optimizer: str, moments: tuple[str, ...] | None
) -> None:
    """Check settings against the inner optimizer: its name, and its moments as far as they are known.

    Raises:
        SettingError: what is averaged would be thrown away, or there is nothing to be averaged.
    """
    if not algorithm(settings.name).averages_moments:
        return
    if state_on_sync == "reset":
        allowed = f"must be keep with strategy.name = {settings.name}, whose means of the moments it would throw away"
        raise SettingError("inner.state_on_sync", state_on_sync, allowed)
    if moments is not None:
        track_codecs.check_has(settings.codec or {}, (PARAMS, *moments), optimizer)
    if moments == () and settings.name == "local_adam":
        raise local_adam.needs_moments(optimizer)


def catches_up(settings: StrategySettings) -> bool:
    """Whether a replica can follow rounds that it has missed, with its own work kept (`Strategy.follow`)."""
    return algorithm(settings.name).catches_up(settings)


def check_fleet(settings: StrategySettings, fleet: FleetSettings) -> None:
    """SettingError where the fleet asks for what this algorithm cannot."""
    if fleet.straggler == "catch_up" and not catches_up(settings):
        name = "dct_momentum with variant: paper" if settings.name == "dct_momentum" else settings.name
        allowed = f"must be wait or drop with strategy.name = {name}, which cannot follow a round that it has missed"
        raise SettingError("fleet.straggler", fleet.straggler, allowed)


def straggler(settings: StrategySettings, fleet: FleetSettings) -> Literal["wait", "drop", "catch_up"]:
    """What is done with a replica that is late, or does not answer for a while: `fleet.straggler`, or what stands for
    it."""
    if fleet.straggler is not None:
        return fleet.straggler
    if catches_up(settings):
        return "catch_up"
    return "wait" if fleet.quorum is None else "drop"


def schedule(settings: StrategySettings, moments: tuple[str, ...], seed: int, total: int) -> Schedule:
    """The ops of a run of `total` nominal steps; the same on all replicas and in the driver."""
    entry = algorithm(settings.name)
    return Schedule(entry.due(settings, moments, seed), total, entry.final, settings.fragments or 1)


def remarks(strategy: Strategy, settings: StrategySettings, steps: int) -> tuple[Remark, ...]:
    """What the user should know about this model with this strategy, in a run of so many inner steps."""
    return strategy.remarks() + algorithm(settings.name).remarks(strategy, settings, steps)


def moments_of(tracks: TrackSet) -> tuple[str, ...]:
    """The moments of the replica's optimizer, as `schedule` wants them."""
    return tracks.moments.names


def build(settings: StrategySettings, tracks: TrackSet, seed: int = 0) -> Strategy:
    """The strategy of one replica, from resolved settings; `seed` is the replica's own, for stochastic rounding."""
    return algorithm(settings.name).build(settings, tracks, seed)


__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Strategy",
    "algorithm",
    "build",
    "catches_up",
    "check_fleet",
    "check_inner",
    "dense_bytes",
    "fragments_of",
    "lasting",
    "moments_of",
    "remarks",
    "resolve",
    "schedule",
    "straggler",
]
