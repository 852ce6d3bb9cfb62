"""Text to tokens: UTF-8 bytes, or a tokenizer of Hugging Face transformers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from ray_lowcomm.core.errors import DataError
from ray_lowcomm.core.settings import DataSettings


@dataclass(frozen=True)
class Tokens:
    """How text becomes numbers.

    `encode` turns texts into one run of tokens, [n] of `dtype`, with the end of each marked if they are documents.
    `key` names the tokenizer and this choice in the key of the cache.
    """

    encode: Callable[[list[str]], np.ndarray]
    dtype: str
    vocab_size: int
    key: str


def make_tokens(settings: DataSettings, documents: bool) -> Tokens:
    """Returns the tokenizer that `settings.tokenizer` names; `documents`: put an end mark after each text.

    The mark is NUL for bytes, and the end-of-sequence token of a tokenizer that has one. Raises DataError if the
    tokenizer cannot be had.
    """
    if settings.tokenizer == "bytes":
        end = b"\0" if documents else b""
        return Tokens(lambda texts: _encode_bytes(texts, end), "uint8", 256, f"bytes/{documents}")
    tokenizer = _load_tokenizer(settings.tokenizer)
    last = [tokenizer.eos_token_id] if documents and tokenizer.eos_token_id is not None else []
    return Tokens(
        lambda texts: _encode_tokens(tokenizer, texts, last), "int32", len(tokenizer), f"{_digest(tokenizer)}/{last}"
    )


def _encode_bytes(texts: list[str], end: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(text.encode() + end for text in texts), dtype=np.uint8)


def _encode_tokens(tokenizer: Any, texts: list[str], last: list[int]) -> np.ndarray:
    if not texts:
        return np.empty(0, dtype=np.int32)
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return np.fromiter((token for ids in encoded for token in (*ids, *last)), dtype=np.int32)


def check_tokenizer(name: str) -> None:
    """Raises DataError if there is no package that could load the tokenizer."""
    if find_spec("transformers") is None:
        raise _no_transformers(name)


def _no_transformers(name: str) -> DataError:
    how = "pip install 'ray_lowcomm[hf]', or use data.tokenizer = 'bytes'"
    return DataError(f"data.tokenizer = {name!r} needs transformers: {how}")


def _load_tokenizer(name: str) -> Any:
    what = f"data.tokenizer = {name!r}"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise _no_transformers(name) from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise DataError(
            f"{what} cannot be loaded: {type(error).__name__}: {first[:200]}; give 'bytes', a local folder, or a "
            "name on the Hugging Face hub and a network"
        ) from error


def _digest(tokenizer: Any) -> str:
    vocabulary = repr(sorted(tokenizer.get_vocab().items()))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else type(tokenizer).__name__
    return hashlib.blake2b((vocabulary + rules).encode(), digest_size=16).hexdigest()
