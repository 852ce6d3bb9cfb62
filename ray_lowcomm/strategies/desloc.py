"""DES-LOC (arXiv 2505.22549): parameters and each optimizer state are averaged on periods of their own.

For any optimizer: all that it keeps for a parameter in its shape is a track (`ray_lowcomm.core.moments`), with the
period of first moments (exp_avg, momentum_buffer), of second ones (exp_avg_sq, max_exp_avg_sq) or of others. Choose
K_x first, then a moment's period near the half-life of its beta (`ray_lowcomm.core.schedule.half_life`); the practical
default is K_u = 3 K_x and K_v = 6 K_x (section D2). With `codec` tracks are sent compressed (`strategies.coded`).
"""

from dataclasses import replace
from typing import Any

from ray_lowcomm.core.outer import OuterOptimizer
from ray_lowcomm.core.schedule import Due, at_random, every
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.track import MomentTrack, Track
from ray_lowcomm.core.tracks import PARAMS, TrackSet
from ray_lowcomm.strategies import track_codecs
from ray_lowcomm.strategies.anchor import Anchor
from ray_lowcomm.strategies.averaging import Averaged, AveragedMoment
from ray_lowcomm.strategies.coded import CodedMoment, build_codec, shared_copy
from ray_lowcomm.strategies.composite import Composite, build_parameters
from ray_lowcomm.strategies.contract import Algorithm, Strategy
from ray_lowcomm.strategies.residual import combiner_of, unused_outer_fields, with_residual
from ray_lowcomm.strategies.streaming import STREAMED, check_streamed, unused_streamed

FIRST, SECOND = ("exp_avg", "momentum_buffer"), ("exp_avg_sq", "max_exp_avg_sq")
MULTIPLES = {"exp_avg_period": 3, "exp_avg_sq_period": 6, "moment_period": 3}  # of the parameters' period, by default


def _period(moment: str) -> str:
    """The setting that is the period of a moment."""
    return "exp_avg_period" if moment in FIRST else "exp_avg_sq_period" if moment in SECOND else "moment_period"


def _due(settings: StrategySettings, moments: tuple[str, ...], seed: int) -> Due:
    periods = {PARAMS: settings.param_period or 1}
    periods |= {moment: getattr(settings, _period(moment)) or 1 for moment in moments}
    return (
        at_random(periods, seed) if settings.periods == "random" else every(periods, fragments=settings.fragments or 1)
    )


def _unused(settings: StrategySettings) -> dict[str, str]:
    unused = unused_outer_fields(settings) | unused_streamed(settings)
    if not track_codecs.any_coded(settings.codec or {}):
        unused["combine"] = "needs strategy.codec with topk, or value_bits below 32, for some track"
    if settings.param_period is not None:
        unused["inner_steps"] = "is the same as strategy.param_period: give one of the two"
    return unused


def _derived(settings: StrategySettings, steps: int | None) -> StrategySettings:
    period = settings.param_period or settings.inner_steps or 1
    return replace(
        settings,
        inner_steps=None,
        param_period=period,
        codec=track_codecs.filled(settings.codec or {}),
        **_periods(settings, period),
    )


def _periods(settings: StrategySettings, period: int) -> dict[str, Any]:
    return {name: getattr(settings, name) or times * period for name, times in MULTIPLES.items()}


def _check(settings: StrategySettings) -> None:
    track_codecs.check(settings.codec or {})
    check_streamed(settings)


def _build(settings: StrategySettings, tracks: TrackSet, seed: int) -> Strategy:
    codecs, moments = settings.codec or {}, tracks.moments.names
    track_codecs.check_has(codecs, (PARAMS, *moments), tracks.optimizers.name)
    parts, fragments = build_parameters(settings, tracks, lambda track: _of_parameters(settings, track, seed))
    bounded = any(track_codecs.codec_of(codecs, track) for track in (PARAMS, *moments))
    for name in moments:
        parts[name, None] = _of_moment(settings, tracks.moment(name), seed, bounded)
    return Composite(tracks, parts, fragments)


def _of_parameters(settings: StrategySettings, track: Track, seed: int) -> Strategy:
    outer = OuterOptimizer(settings.outer_optimizer or "none", settings.outer_lr or 1.0, settings.outer_momentum or 0.0)
    codec, anchor = track_codecs.codec_of(settings.codec or {}, PARAMS), Anchor(track, outer)
    if codec is None:
        return Averaged(anchor)
    own = replace(track_codecs.as_settings(codec), combine=settings.combine)
    return with_residual(own, anchor, build_codec(codec, anchor, seed))


def _of_moment(settings: StrategySettings, track: MomentTrack, seed: int, bounded: bool) -> Strategy:
    codec = track_codecs.codec_of(settings.codec or {}, track.name)
    if codec is None:
        return AveragedMoment(track, bounded)
    own, copy = replace(track_codecs.as_settings(codec), combine=settings.combine), shared_copy(track)
    return CodedMoment(track, copy, combiner_of(own, build_codec(codec, copy, seed), copy), own)


def _remarks(strategy: Strategy, settings: StrategySettings, steps: int) -> tuple[str, ...]:
    """What of the optimizer's state is not averaged, and settings for moments that it does not have."""
    assert isinstance(strategy, Composite)
    moments, name = strategy.tracks.moments, strategy.tracks.optimizers.name
    if not moments.names:
        return (*moments.remarks(), f"{name} has no moments, so desloc averages parameters only, as local_sgd does")
    used, said = {_period(moment) for moment in moments.names}, list(moments.remarks())
    for period, times in MULTIPLES.items():
        value = getattr(settings, period)
        if period not in used and value != times * (settings.param_period or 1):
            said.append(
                f"strategy.{period} = {value} has no effect: the moments of {name} are {', '.join(moments.names)}"
            )
    others = [moment for moment in moments.names if _period(moment) == "moment_period"]
    if others and (settings.moment_period or 1) > steps:
        late = f"is more than the {steps} steps of the run: {', '.join(others)} will never be averaged"
        said.append(f"strategy.moment_period = {settings.moment_period} {late}")
    return tuple(said)


DESLOC = Algorithm(
    defaults={
        "inner_steps": 32,
        "param_period": None,
        "exp_avg_period": None,
        "exp_avg_sq_period": None,
        "moment_period": None,
        "periods": "fixed",
        "outer_optimizer": "none",
        "outer_lr": 1.0,
        "outer_momentum": 0.9,
        "codec": {},
        "combine": "gather",
        **STREAMED,
    },
    due=_due,
    build=_build,
    derived=_derived,
    unused=_unused,
    check=_check,
    remarks=_remarks,
    averages_moments=True,
)
