"""The settings `strategy.codec`: how each track of DES-LOC is coded, with defaults filled in and checked."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ray_lowcomm.core.codecs.formats import ValueFormat
from ray_lowcomm.core.codecs.topk import kept_per_chunk
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from ray_lowcomm.core.tracks import PARAMS

OTHERS = "default"

Codecs = Mapping[str, TrackCodec]


def filled(codecs: Codecs) -> dict[str, TrackCodec]:
    """The same with a value for every field that has an effect with the others as they are; None for the others."""
    return {track: _filled(track, codec) for track, codec in codecs.items()}


def any_coded(codecs: Codecs) -> bool:
    """Whether any track is sent otherwise than as it is."""
    return any(map(_coded, codecs.values()))


def check(codecs: Codecs) -> None:
    """SettingError on a value that is not allowed, or on a field that has no effect, of filled settings."""
    for track, codec in codecs.items():
        for field, allowed in _problems(track, codec):
            raise SettingError(f"strategy.codec.{track}.{field}", getattr(codec, field), allowed)


def codec_of(codecs: Codecs, track: str) -> TrackCodec | None:
    """What stands for a track, from filled settings; None if it is sent as it is."""
    codec = codecs.get(track, codecs.get(OTHERS))
    if codec is None or not _coded(codec):
        return None
    if track == PARAMS:
        return codec
    decay = 1.0 if codec.residual == "buffer" else codec.residual_decay
    return replace(codec, residual="model", residual_decay=decay, reduce="replicas")  # a moment's mean is over all


def check_has(codecs: Codecs, tracks: tuple[str, ...], optimizer: str) -> None:
    """SettingError if a codec is for a track that the optimizer does not have."""
    for track, codec in codecs.items():
        if track not in (*tracks, OTHERS):
            allowed = f"no such track; with {optimizer} there are {', '.join((*tracks, OTHERS))}"
            raise SettingError(f"strategy.codec.{track}", _shown(codec), allowed)


def as_settings(codec: TrackCodec) -> StrategySettings:
    """The fields as those of a strategy that has only one track."""
    return StrategySettings(
        name="desloc",
        topk=codec.topk,
        chunk_size=codec.chunk_size,
        value_bits=codec.value_bits,
        value_format=codec.value_format,
        rounding=codec.rounding,
        residual=codec.residual,
        residual_decay=codec.residual_decay,
        reduce=codec.reduce,
    )


def _coded(codec: TrackCodec) -> bool:
    return codec.topk is not None or (codec.value_bits or 32) != 32


def _filled(track: str, codec: TrackCodec) -> TrackCodec:
    fill: dict[str, object] = {}
    if codec.topk is not None:
        fill |= {"transform": "none", "chunk_size": 64, "value_bits": 2}
        fill |= {"reduce": "replicas"} if track in (PARAMS, OTHERS) else {}
    bits = codec.value_bits or fill.get("value_bits", 32)
    if _coded(codec):
        kept = codec.residual or "model"
        fill |= {"value_bits": bits, "residual_decay": 0.95 if kept == "buffer" else 1.0}
        fill |= {"residual": kept} if track in (PARAMS, OTHERS) else {}
    if bits != 32:
        fill["rounding"] = "nearest"
    if bits == 4:
        fill["value_format"] = "linear"
    missing = {name: value for name, value in fill.items() if getattr(codec, name) is None}
    return replace(codec, **missing)  # type: ignore[arg-type]  # each value is of its field's type


def _problems(track: str, codec: TrackCodec) -> Iterator[tuple[str, str]]:
    """(field, what is allowed) of a filled codec."""
    here = f"strategy.codec.{track}"
    if codec.topk is None:
        yield from _given(codec, ("transform", "chunk_size", "reduce"), f"needs {here}.topk")
    elif codec.chunk_size is not None and codec.chunk_size < 1:
        yield "chunk_size", "must be greater than 0"
    try:
        if codec.topk is not None:
            kept_per_chunk(codec.topk, codec.chunk_size or 64)
        if codec.value_bits is not None:
            ValueFormat(codec.value_bits)
    except SettingError as error:
        yield error.field.rpartition(".")[2], error.allowed
    if not _coded(codec):
        yield from _given(codec, ("residual", "residual_decay"), f"needs {here}.topk, or {here}.value_bits below 32")
    if (codec.value_bits or 32) == 32:
        yield from _given(codec, ("rounding",), f"needs {here}.value_bits below 32")
    if codec.value_bits != 4:
        yield from _given(codec, ("value_format",), f"needs {here}.value_bits: 4")
    if track not in (PARAMS, OTHERS):
        yield from _given(codec, ("residual",), "is of params only: a moment keeps itself what was not sent")
        yield from _given(codec, ("reduce",), "is of params only: a moment's mean is over all replicas")
    if codec.residual_decay is not None and not 0 <= codec.residual_decay <= 1:
        yield "residual_decay", "must be between 0 and 1"


def _given(codec: TrackCodec, fields: tuple[str, ...], why: str) -> Iterator[tuple[str, str]]:
    return ((field, why) for field in fields if getattr(codec, field) is not None)


def shown(codecs: Codecs) -> dict[str, dict[str, object]]:
    """What was given for each track."""
    return {track: _shown(codec) for track, codec in codecs.items()}


def _shown(codec: TrackCodec) -> dict[str, object]:
    return {name: value for name, value in vars(codec).items() if value is not None}
