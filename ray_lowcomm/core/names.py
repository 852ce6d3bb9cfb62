"""Which parameters and buffers take part, and under which name: decided here, by name, and nowhere else.

Wrappers leave their mark in names (``_orig_mod.`` of torch.compile, ``module.`` of DistributedDataParallel); state is
keyed by the clean name, so that a wrapped and a bare model can exchange and load each other's state.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.sharding import is_distributed

WRAPPER_PARTS = frozenset({"_orig_mod", "module"})


def clean_name(name: str) -> str:
    """Name without the parts that torch.compile and DistributedDataParallel put into it."""
    parts = [part for part in name.split(".") if part not in WRAPPER_PARTS]
    return ".".join(parts) if parts else name


def trainable_parameters(model: nn.Module, *, allow_none: bool = False) -> dict[str, nn.Parameter]:
    """Trainable parameters by clean name, in the model's order; a tied one once, under its first name.

    With `allow_none` there may be none that is trainable.

    Raises:
        ModelError: a subclassed or complex parameter, two parameters with one clean name, or none that is trainable.
    """
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        _check_parameter(name, parameter)
        clean = clean_name(name)
        if clean in found:
            raise ModelError(f"two parameters share the name {clean!r} once wrapper prefixes are removed: rename one")
        found[clean] = parameter
    if not found and not allow_none:
        raise ModelError("the model has no trainable parameter: nothing to train or to exchange")
    return found


def trained_names(model: nn.Module) -> set[str]:
    """All clean names of trainable parameters; of a tied one each that it has."""
    return {clean_name(name) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers by clean name, in the model's order; a shared one once."""
    persistent = {clean_name(name) for name in model.state_dict(keep_vars=True)}
    return {clean_name(name): b for name, b in model.named_buffers() if clean_name(name) in persistent}


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's own state_dict by clean name, without extra state that is not a tensor."""
    state = model.state_dict()
    return {clean_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def untied(model: nn.Module) -> dict[str, Tensor]:
    """As `model_state`; of names that are one tensor the first."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            found[clean_name(name)] = value.detach()
    return found


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if type(parameter.data) is not Tensor and not is_distributed(parameter):
        raise ModelError(
            f"parameter {name!r} is a {type(parameter.data).__name__}: of subclasses only DTensor (FSDP2's "
            "fully_shard) is supported; give each replica a plain copy of the model, or shard it over context.mesh"
        )
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        raise ModelError(
            f"parameter {name!r} has dtype {parameter.dtype}: allowed are float16, bfloat16, float32, float64"
        )
    if parameter.is_meta:
        raise ModelError(f"parameter {name!r} is on the meta device: materialise the model before it is wrapped")


def work_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """Dtype of anchor, outer state and exchanged values: float32, or float64 for a model that has float64 parameters.

    Low-precision parameters never lower it (ALGORITHMS: bf16 swallows updates below about 1e-3 relative).
    """
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
