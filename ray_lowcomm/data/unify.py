"""One type for a column of many files: what may differ between them, and what may not."""

from collections.abc import Sequence
from functools import reduce

import pyarrow as pa
import pyarrow.types as kinds


def family(kind: pa.DataType) -> str | None:
    """Returns what values of a type are, however they are stored; None for a column that holds only null."""
    kind = _stored(kind)
    if kinds.is_null(kind):
        return None
    if kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind):
        return "text"
    if kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind):
        return "bytes"
    if kinds.is_fixed_size_binary(kind):
        return "bytes"
    if kinds.is_integer(kind):
        return "whole numbers"
    if kinds.is_floating(kind):
        return "fractions"
    if is_list(kind):
        return f"lists of {family(kind.value_type)}"
    if kinds.is_struct(kind):
        return "structures of " + ", ".join(sorted(field.name for field in kind))
    return str(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of Arrow's lists, of any or of fixed length."""
    return bool(
        kinds.is_list(kind)
        or kinds.is_large_list(kind)
        or kinds.is_fixed_size_list(kind)
        or kinds.is_list_view(kind)
        or kinds.is_large_list_view(kind)
    )


def merge(types: Sequence[pa.DataType]) -> pa.DataType:
    """Returns a type that holds the values of all `types`, which are of one `family`, without loss.

    Dictionaries and views are undone, which ``datasets`` does not know; other types that are equal stay as they are.
    """
    return reduce(_merge, map(_stored, types))


def _merge(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if one == other or kinds.is_null(other):
        return one
    if kinds.is_null(one):
        return other
    if is_list(one):
        return pa.large_list(_merge(_stored(one.value_type), _stored(other.value_type)))
    if kinds.is_struct(one):
        return pa.struct([pa.field(field.name, _merge(field.type, other.field(field.name).type)) for field in one])
    if kinds.is_integer(one):
        small = all(
            not kinds.is_uint64(kind) and not kinds.is_uint32(kind) and kind.bit_width <= 32 for kind in (one, other)
        )
        return pa.int32() if small else pa.int64()
    if kinds.is_floating(one):
        return one if one.bit_width > other.bit_width else other
    return pa.large_string() if family(one) == "text" else pa.large_binary()


def _stored(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return _stored(kind.storage_type)
    if kinds.is_dictionary(kind):
        return _stored(kind.value_type)
    if kinds.is_list_view(kind) or kinds.is_large_list_view(kind):
        return pa.large_list(_stored(kind.value_type))
    if kinds.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if kinds.is_binary_view(kind) else kind
