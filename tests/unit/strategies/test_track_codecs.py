"""The settings of codecs for tracks: defaults, and what is refused."""

from typing import Any

import pytest

from ray_lowcomm.config import ConfigError, load_config, to_yaml
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings, TrackCodec
from ray_lowcomm.strategies import resolve
from ray_lowcomm.strategies.track_codecs import codec_of


def _resolved(**codec: TrackCodec) -> dict[str, TrackCodec]:
    resolved = resolve(StrategySettings(name="desloc", codec=codec))
    assert resolve(resolved) == resolved
    assert resolved.codec is not None
    return resolved.codec


def test_defaults() -> None:
    sparse = {"topk": 64, "transform": "none", "chunk_size": 64, "value_bits": 2, "rounding": "nearest"}
    found = _resolved(params=TrackCodec(topk=64), exp_avg=TrackCodec(topk=64), exp_avg_sq=TrackCodec())
    assert found["params"] == TrackCodec(**sparse, residual="model", residual_decay=1.0, reduce="replicas")
    assert found["exp_avg"] == TrackCodec(**sparse, residual_decay=1.0)
    assert found["exp_avg_sq"] == TrackCodec()
    assert _resolved(params=TrackCodec(topk=1, residual="buffer"))["params"].residual_decay == 0.95
    assert _resolved(default=TrackCodec(value_bits=4))["default"] == TrackCodec(
        value_bits=4, value_format="linear", rounding="nearest", residual="model", residual_decay=1.0
    )
    assert _resolved() == {}


def test_what_is_not_named_has_the_default_or_none() -> None:
    codecs = _resolved(default=TrackCodec(topk=8, residual="buffer", reduce="senders"), exp_avg=TrackCodec())
    params, second = codec_of(codecs, "params"), codec_of(codecs, "exp_avg_sq")
    assert params is not None
    assert second is not None
    assert (params.topk, params.residual, params.residual_decay) == (8, "buffer", 0.95)
    assert (second.topk, second.residual, second.residual_decay) == (8, "model", 1.0)  # a buffer is of parameters only
    assert (params.reduce, second.reduce) == ("senders", "replicas")  # so are senders
    assert codec_of(codecs, "exp_avg") is None
    assert codec_of(_resolved(params=TrackCodec(topk=8)), "exp_avg") is None


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("params", {"topk": 0}, r"strategy\.codec\.params\.topk = 0: must be between 1 and chunk_size² = 4096"),
    ("params", {"topk": 17, "chunk_size": 4}, r"codec\.params\.topk = 17: must be between 1 and chunk_size² = 16"),
    ("params", {"topk": 1, "chunk_size": 0}, r"codec\.params\.chunk_size = 0: must be greater than 0"),
    ("exp_avg", {"topk": 4, "value_bits": 3}, r"strategy\.codec\.exp_avg\.value_bits = 3: must be one of 32, 16"),
    ("params", {"chunk_size": 4}, r"codec\.params\.chunk_size = 4: needs strategy\.codec\.params\.topk"),
    (
        "params",
        {"value_bits": 8, "transform": "dct"},
        r"params\.transform = 'dct': needs strategy\.codec\.params\.topk",
    ),
    ("params", {"residual": "model"}, r"params\.residual = 'model': needs .*topk, or .*value_bits below 32"),
    ("params", {"topk": 4, "residual_decay": 2.0}, r"residual_decay = 2\.0: must be between 0 and 1"),
    ("params", {"topk": 4, "value_bits": 32, "rounding": "nearest"}, r"rounding = 'nearest': needs .*bits below 32"),
    (
        "params",
        {"topk": 4, "value_format": "e3m0"},
        r"value_format = 'e3m0': needs strategy\.codec\.params\.value_bits: 4",
    ),
    ("exp_avg", {"topk": 4, "reduce": "senders"}, r"exp_avg\.reduce = 'senders': is of params only"),
    ("params", {"value_bits": 4, "reduce": "senders"}, r"params\.reduce = 'senders': needs .*params\.topk"),
    ("exp_avg_sq", {"topk": 4, "residual": "buffer"}, r"exp_avg_sq\.residual = 'buffer': is of params only"),
]


@pytest.mark.parametrize(("track", "fields", "text"), BAD, ids=str)
def test_what_makes_no_sense_is_refused_with_what_is_allowed(track: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingError, match=text):
        _resolved(**{track: TrackCodec(**fields)})


def test_other_strategies_have_no_codecs() -> None:
    with pytest.raises(SettingError, match=r"strategy\.codec = .*: is not used by diloco, which takes"):
        resolve(StrategySettings(name="diloco", codec={"params": TrackCodec(topk=4)}))


def _load(*argv: str) -> Any:
    return load_config(["--strategy.name", "desloc", *argv], environment={})


def test_command_line_and_file_are_merged_field_by_field(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("strategy: {codec: {params: {topk: 8, value_bits: 1}, default: {topk: 4, transform: dct}}}\n")
    config = _load("--config", str(file), "--strategy.codec.params.topk", "16", "--strategy.codec.exp_avg", "{}")
    assert config.strategy.codec == {
        "params": TrackCodec(topk=16, value_bits=1),
        "default": TrackCodec(topk=4, transform="dct"),
        "exp_avg": TrackCodec(),
    }
    for written in (config, config.resolved()):
        file.write_text(to_yaml(written))
        assert _load("--config", str(file)) == written


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--strategy.codec.params.top", "4"],
            r"strategy\.codec\.params\.top = '?4'?: no such field; there are: topk, tr",
        ),
        (["--strategy.codec.params.topk", "x"], r"strategy\.codec\.params\.topk = 'x': must be a whole number or null"),
        (
            ["--strategy.codec.params.transform", "x"],
            r"strategy\.codec\.params\.transform = 'x': must be none, dct or null",
        ),
        (["--strategy.codec.params", "4"], r"strategy\.codec\.params = 4: must be a section with topk, transform"),
        (
            ["--strategy.codec.v.topk", "4"],
            r"strategy\.codec\.v = {'topk': 4}: no such track; with adamw there are params, exp_avg, exp_avg_sq, def",
        ),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}[^\\n]*$"):
        _load(*argv)


def test_how_messages_are_combined_is_for_coded_tracks_only() -> None:
    with pytest.raises(SettingError, match=r"strategy\.combine = 'sharded': needs strategy\.codec"):
        resolve(StrategySettings(name="desloc", combine="sharded"))
    coded = resolve(StrategySettings(name="desloc", combine="sharded", codec={"params": TrackCodec(topk=4)}))
    assert coded.combine == "sharded"
