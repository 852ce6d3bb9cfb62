"""What a data set is used as: text, tokens or images, by the columns that it has and those that the settings name."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings

_FIELDS = {
    "text": ("text_column", "sequence_length", "tokenizer"),
    "tokens": ("tokens_column", "sequence_length"),
    "images": ("image_column", "label_column"),
}
"""The fields that are about one use only."""

MASK, LABELS = "attention_mask", "labels"
"""Columns beside tokens: which of them are no padding, and what is to be learned."""


@dataclass(frozen=True)
class Use:
    """`columns` are all that is read: the first holds text, tokens or images, the others what goes with it."""

    kind: Literal["text", "tokens", "images"]
    columns: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def choose_use(columns: Sequence[str], everywhere: Sequence[str], settings: DataSettings, what: str) -> Use:
    """Decides by the `columns` that the files have, those of them that all files have, and the settings.

    Text comes before images, and tokens before text unless a tokenizer or the text's column is given. Raises DataError
    if there is nothing to train on.
    """
    named = set(_named(settings))
    tokens, text = settings.tokens_column in columns, settings.text_column in columns
    if "tokens_column" in named and settings.tokens_column is not None and not tokens:
        raise DataError(
            f"{what} has no column {settings.tokens_column!r} (data.tokens_column); its columns are "
            f"{', '.join(columns) or 'none'}"
        )
    images = settings.image_column in columns and settings.label_column in columns
    if images and named & set(_FIELDS["images"]) and not named & {"text_column", "tokens_column"}:
        return _with_remarks(Use("images", (settings.image_column, settings.label_column)), settings, what)
    if tokens and text and named & {"text_column", "tokenizer"} and "tokens_column" not in named:
        tokens = False
    if tokens:
        assert settings.tokens_column is not None
        beside = tuple(name for name in (MASK, LABELS) if name in everywhere)
        said: tuple[str, ...] = ()
        if text:
            said = (
                f"{what} has the columns {settings.text_column!r} and {settings.tokens_column!r}: the tokens are "
                "trained on; for the text give data.tokenizer, or data.tokens_column = null",
            )
        return _with_remarks(Use("tokens", (settings.tokens_column, *beside), said), settings, what)
    if text:
        return _with_remarks(Use("text", (settings.text_column,)), settings, what)
    if images:
        return _with_remarks(Use("images", (settings.image_column, settings.label_column)), settings, what)
    raise DataError(
        f"{what} has neither a column {settings.text_column!r} (data.text_column) or {settings.tokens_column!r} "
        f"(data.tokens_column) nor the columns {settings.image_column!r} and {settings.label_column!r} "
        f"(data.image_column, data.label_column); its columns are {', '.join(columns) or 'none'}"
    )


def _named(settings: DataSettings) -> list[str]:
    """The fields that are not as they are by default."""
    usual = DataSettings()
    return [field.name for field in fields(settings) if getattr(settings, field.name) != getattr(usual, field.name)]


def _with_remarks(use: Use, settings: DataSettings, what: str) -> Use:
    """Adds what only the data can tell: fields that have no effect on data such as this."""
    own = _FIELDS[use.kind]
    idle = {name for kind in _FIELDS for name in _FIELDS[kind]} - set(own)
    if settings.tokens_column is None:
        idle.discard("tokens_column")
    found = ((name, getattr(settings, name)) for name in _named(settings) if name in idle)
    said = (f"data.{name} = {value!r}: has no effect, {what} is read as {use.kind}" for name, value in found)
    return Use(use.kind, use.columns, (*use.remarks, *said))
