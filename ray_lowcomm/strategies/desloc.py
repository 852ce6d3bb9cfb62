"""DES-LOC (arXiv 2505.22549): parameters and each optimizer state are averaged on periods of their own.

For AdamW and ADOPT (exp_avg, exp_avg_sq) and for SGD with momentum (momentum_buffer, on the period of exp_avg). Choose
K_x first, then a moment's period near the half-life of its beta (`ray_lowcomm.core.schedule.half_life`); the practical
default is K_u = 3 K_x and K_v = 6 K_x (section D2). With `codec` tracks are sent compressed (`strategies.coded`).
"""

from dataclasses import replace

from ray_lowcomm.core import optimizer_state
from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due, at_random, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.strategies import track_codecs
from ray_lowcomm.strategies.averaging import PeriodicAveraging
from ray_lowcomm.strategies.coded import with_codecs
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.residual import unused_outer_fields


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    periods = {PARAMS: settings.param_period or 1}
    for moment in moments:
        second = moment in track_codecs.SECOND_MOMENTS
        periods[moment] = (settings.exp_avg_sq_period if second else settings.exp_avg_period) or 1
    return at_random(periods, seed) if settings.periods == "random" else every(periods)


def _unused(settings: StrategySettings) -> dict[str, str]:
    unused = unused_outer_fields(settings)
    if not track_codecs.any_coded(settings.codec or {}):
        unused["combine"] = "needs strategy.codec with topk, or value_bits below 32, for some track"
    if settings.param_period is not None:
        unused["inner_steps"] = "is the same as strategy.param_period: give one of the two"
    return unused


def _derived(settings: StrategySettings) -> StrategySettings:
    period = settings.param_period or settings.inner_steps or 1
    return replace(
        settings,
        inner_steps=None,
        param_period=period,
        exp_avg_period=settings.exp_avg_period or 3 * period,
        exp_avg_sq_period=settings.exp_avg_sq_period or 6 * period,
        codec=track_codecs.filled(settings.codec or {}),
    )


def _check(settings: StrategySettings) -> None:
    track_codecs.check(settings.codec or {})


def _build(settings: StrategySettings, tracks: Tracks, seed: int) -> Strategy:
    outer = OuterOptimizer(settings.outer_optimizer or "none", settings.outer_lr or 1.0, settings.outer_momentum or 0.0)
    dense = PeriodicAveraging(tracks, optimizer_state.moment_names(tracks.optimizers), outer)
    return with_codecs(dense, settings, seed) if settings.codec else dense


DESLOC = Algorithm(
    defaults={
        "inner_steps": 32,
        "param_period": None,
        "exp_avg_period": None,
        "exp_avg_sq_period": None,
        "periods": "fixed",
        "outer_optimizer": "none",
        "outer_lr": 1.0,
        "outer_momentum": 0.9,
        "codec": {},
        "combine": "gather",
    },
    due=_due,
    build=_build,
    derived=_derived,
    unused=_unused,
    check=_check,
)
