"""From settings to this process's shard of a model, without as many whole copies in memory as there are shards."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ray_lowcomm.core.settings import ModelSettings
from ray_lowcomm.models.build import build
from ray_lowcomm.models.initial import load_parts
from ray_lowcomm.models.sharding import Sharded, prepare_blocks, shard

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where a model goes: process `shard` of the `shards` of a replica, over `mesh()`, on `device`. `meet` returns once
    all of them have called it. `reduced`: it computes in bfloat16 where that is done on `device`."""

    device: torch.device
    shard: int
    shards: int
    mesh: Callable[[], Any]
    meet: Callable[[], object]
    reduced: bool = False


def build_at(
    place: Place, settings: ModelSettings, defaults: Mapping[str, Any] | None = None, say: Say = lambda text: None
) -> Sharded:
    """The model that `settings` name (see `build`), its blocks prepared, sharded as they say. On all shards the same
    random numbers make the same model as on one process.

    With FSDP2 over several shards weights of `settings.init_from` are read by each shard for its own part; new weights
    need memory for one whole model, which one shard after another makes and cuts.

    Raises ModelError, as `build`, `prepare_blocks` and `shard` do.
    """
    if settings.sharded_as(place.shards) != "fsdp2" or place.shards == 1:
        return _sharded(place, settings, build(settings, defaults, say))
    if settings.init_from is not None:
        model = _without_weights(settings, defaults)
        if model is not None:
            made = _sharded(place, settings, model)
            for text in load_parts(made.model, settings.init_from):
                say(text)
            return made
    return _in_turn(place, lambda: _sharded(place, settings, build(settings, defaults, say)))


def _sharded(place: Place, settings: ModelSettings, model: nn.Module) -> Sharded:
    prepare_blocks(model, settings)
    return shard(model, settings.sharded_as(place.shards), place.mesh, place.device, place.reduced)


def _in_turn(place: Place, make: Callable[[], Sharded]) -> Sharded:
    """What `make` makes, called by one shard after the other; all have had their turn when this returns or raises."""
    made: Sharded | None = None
    problem: Exception | None = None
    for turn in range(place.shards):
        if turn == place.shard:
            try:
                made = make()
            except Exception as error:  # others wait for their turn
                problem = error
        place.meet()
    if problem is not None:
        raise problem
    assert made is not None, "each shard has a turn"
    return made


def _without_weights(settings: ModelSettings, defaults: Mapping[str, Any] | None) -> nn.Module | None:
    """The model with parameters on the meta device and all else in place; None where its factory needs values."""
    try:
        with _parameters_on_meta():
            model = build(replace(settings, init_from=None), defaults)
    except Exception:  # what is really wrong is told when it is made with values
        return None
    return None if any(buffer.is_meta for buffer in model.buffers()) else model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory when a module gets them: there is never more than one with values. torch's own
    device context would do so to buffers, too, of which some are in no file."""

    def emptied(module: nn.Module, name: str, parameter: Tensor) -> Any:
        if parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        hook.remove()
