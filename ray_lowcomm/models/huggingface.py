"""A causal language model of Hugging Face transformers, from a local config. Needs the extra ``[hf]``."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError


class HuggingFaceLM(nn.Module):
    """Gives `hf_model`, a ``PreTrainedModel``, the interface of this package: `forward` returns the mean loss.

    `hf_model.save_pretrained(folder)` writes what transformers reads.
    """

    def __init__(self, hf_model: Any) -> None:
        super().__init__()
        self.hf_model: Any = hf_model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean cross-entropy, 0-d, in nats, of `labels` given `input_ids`, both [B, T] int64."""
        # Not `labels=` of the model: that shifts by one token, and our labels are shifted already.
        logits = self.logits(batch["input_ids"]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def logits(self, input_ids: Tensor) -> Tensor:
        """Returns the scores of the next token, [B, T, vocab_size]."""
        return self.hf_model(input_ids=input_ids, use_cache=False).logits


def build_huggingface(path: str, args: dict[str, Any]) -> HuggingFaceLM:
    """Builds the causal LM of the config at `path` (a folder with ``config.json``, or a JSON file) with new weights.

    `args` replace fields of the config. Nothing is downloaded. Raises ModelError if transformers is missing, the
    config cannot be read, a field is unknown or the model cannot be made.
    """
    config = read_config(path, args)
    from transformers import AutoModelForCausalLM

    with _quiet():
        try:
            return HuggingFaceLM(AutoModelForCausalLM.from_config(config))
        except Exception as error:
            what = "no causal language model can be made of it"
            raise ModelError(f"model.name = 'hf:{path}': {what}: {_cause(error)}") from error


def read_config(path: str, args: dict[str, Any]) -> Any:
    """Returns the config at `path` with `args` in the place of its fields; ModelError as `build_huggingface`."""
    name = f"model.name = 'hf:{path}'"
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ModelError(f"{name} needs transformers: pip install 'ray_lowcomm[hf]' ({error})") from error
    found = Path(path)
    if not (found.is_file() or (found / "config.json").is_file()):
        raise ModelError(f"{name}: no such config; give a local folder with config.json, or a JSON file")
    with _quiet():
        try:
            options = {"return_unused_kwargs": True, "local_files_only": True}
            config, unknown = AutoConfig.from_pretrained(path, **options, **args)
        except Exception as error:
            raise ModelError(f"{name}: not a config of transformers: {_cause(error)}") from error
    if unknown:
        raise ModelError(f"model.args: the config of {path} has no field {', '.join(map(repr, sorted(unknown)))}")
    return config


def save_configs(hf_model: Any, folder: str) -> None:
    """Write what `save_pretrained` writes beside the weights: the config, and that of generation if there is one."""
    hf_model.config.save_pretrained(folder)
    if hf_model.can_generate() and getattr(hf_model, "generation_config", None) is not None:
        hf_model.generation_config.save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _cause(error: BaseException) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}"
