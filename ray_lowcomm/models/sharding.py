"""A model over the processes of a replica: FSDP2 or DDP, and what is done to its blocks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.core.sharding import check_cuttable
from ray_lowcomm.models.cpu_collectives import use_less_memory

BLOCKS = "_no_split_modules"
"""Attribute of a model, as transformers has it: names of the classes whose modules are its blocks."""

LARGE = 1 << 22  # bytes of a matrix from which on it is worth messages of its own


@dataclass(frozen=True)
class Sharded:
    """A model as this process trains it: `trained` is called with a batch, `model` is what the replica wraps, with the
    names that it has on one process."""

    model: nn.Module
    trained: nn.Module

    def unsynced(self) -> AbstractContextManager[None]:
        """Within it gradients add up in this process, and no shard waits for another: for all backward passes of a step
        but the last."""
        if hasattr(self.trained, "no_sync"):
            return self.trained.no_sync()  # type: ignore[operator]
        return _unsynced(self.trained) if hasattr(self.trained, "set_requires_gradient_sync") else nullcontext()


def prepare_blocks(model: nn.Module, settings: ModelSettings) -> None:
    """Have each block compute its activations again in the backward pass, and compile it, as `settings` say. Names of
    parameters stay.

    Raises:
        ModelError: there is something to do, and no block.
    """
    for block in blocks_to_prepare(model, settings):
        forward: Callable[..., Any] = block.forward
        if settings.activation_checkpointing:
            forward = partial(_checkpointed, forward)
        if settings.compile:
            forward = torch.compile(forward)
        block.forward = forward


def blocks_to_prepare(model: nn.Module, settings: ModelSettings) -> list[nn.Module]:
    """Those with which something is to be done; ModelError as `prepare_blocks`."""
    wanted = [name for name in ("activation_checkpointing", "compile") if getattr(settings, name)]
    if not wanted:
        return []
    blocks = blocks_of(model)
    if not blocks:
        raise ModelError(
            f"model.{wanted[0]} = True: {type(model).__name__} has no blocks, neither classes named in {BLOCKS} nor an "
            "nn.ModuleList of one class: name them there, or leave the setting out"
        )
    return blocks


def shard(
    model: nn.Module,
    kind: Literal["fsdp2", "ddp", "none"],
    mesh: Callable[[], Any],
    device: torch.device,
    reduced: bool = False,
) -> Sharded:
    """The model on `device`, sharded over `mesh()`. With `fsdp2` and `reduced` it computes in bfloat16; parameters,
    and sums of gradients, stay in float32. What is on the meta device gets memory, and no values.

    Raises:
        ModelError: a parameter that cannot be cut.
    """
    if kind == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return Sharded(model, DistributedDataParallel(model.to(device), process_group=mesh().get_group()))
    if kind == "fsdp2":
        _fully_shard(model, mesh(), reduced and device.type == "cuda")
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    return Sharded(model, model)


def units_of(model: nn.Module, device: str) -> list[nn.Module]:
    """The modules that FSDP2 gathers and reduces each for itself, inner ones first: the blocks, and the whole for the
    rest.

    On the CPU, where nothing is gathered while something else is computed, large nn.Linear modules in a block are units
    too: a unit is held whole twice over, by parameters and gradients. Not where the model names its blocks in
    `_no_split_modules`, and not in one that is compiled.
    """
    blocks = blocks_of(model)
    if device != "cpu" or any(getattr(module, BLOCKS, None) for module in model.modules()):
        return [*blocks, model]
    inner = [part for block in blocks if not _compiled(block) for part in block.modules() if part is not block]
    return [*(part for part in inner if _is_large(part)), *blocks, model]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model that are sharded, compiled and computed again each for itself.

    Modules of the classes that the model names in `_no_split_modules`; else all entries of lists of blocks: of an
    nn.ModuleList, or of an nn.Sequential with several, whose entries have parameters and are of one class. Of what lies
    in each other only the outermost.
    """
    named = {name for module in model.modules() for name in getattr(module, BLOCKS, None) or ()}
    named &= {type(module).__name__ for module in model.modules()}
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        entries = [child for child in module.children() if type(child).__name__ in named] if named else _listed(module)
        found.extend(entry for entry in entries if _has_parameters(entry))
        for child in module.children():
            if child not in entries:
                look(child)

    look(model)
    return list(dict.fromkeys(found))


def _is_large(module: nn.Module) -> bool:
    """Not a subclass: it may be used otherwise than by calling it."""
    return type(module) is nn.Linear and module.weight.numel() * module.weight.element_size() >= LARGE


def _compiled(block: nn.Module) -> bool:
    return hasattr(block.forward, "_torchdynamo_orig_callable")


def _listed(module: nn.Module) -> list[nn.Module]:
    """Entries of `module`, if it is a list of blocks."""
    entries, containers = list(module.children()), (nn.ModuleList, nn.ModuleDict, nn.ParameterList)
    alike = len({type(entry) for entry in entries}) == 1 and not isinstance(entries[0], containers)
    long = isinstance(module, nn.ModuleList) or (type(module) is nn.Sequential and len(entries) > 1)
    return entries if alike and long and all(map(_has_parameters, entries)) else []


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _fully_shard(model: nn.Module, mesh: Any, reduced: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    check_cuttable(model)
    # of whole parameters in bfloat16 alone the sum of many gradients would lose what is small
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if reduced else MixedPrecisionPolicy()
    for module in units_of(model, mesh.device_type):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if mesh.device_type == "cpu" and mesh.size() > 1:
            use_less_memory(module)
    if callable(getattr(model, "metrics", None)):  # called for itself
        register_fsdp_forward_method(model, "metrics")


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


@contextmanager
def _unsynced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
