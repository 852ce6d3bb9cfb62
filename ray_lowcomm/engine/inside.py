"""What the shards of a replica do together: they are processes that train one copy of the model.

All calls are collective, in the same order on all shards; but for `agree` in the thread that trains.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ray_lowcomm.core.errors import FleetError


class Inside(Protocol):
    """The other shards of this replica, seen from one of them: number `shard` of `shards`."""

    @property
    def shard(self) -> int:
        """Number of this one, 0 <= shard < shards. The first one is the leader."""
        ...

    @property
    def shards(self) -> int:
        """How many there are."""
        ...

    def mesh(self, device: str) -> Any:
        """Their DeviceMesh over devices of this type (``cpu``, ``cuda``), with one dimension, ``shard``."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over the shards, in their order, of small vectors, float64 [k] on the CPU: equal to the bit on
        all."""
        ...

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Overwrite each tensor, in place, with what its owner, a shard's number, has. Shapes and dtypes are the same
        on all."""
        ...

    def agree(self, about: str, problem: str) -> str:
        """What is wrong with any shard, '' if nothing is, where this one has `problem`. From any thread; calls belong
        together that are `about` the same.

        Raises:
            FleetError: not all shards have called in time.
        """
        ...


class Alone:
    """A replica of one process."""

    shard, shards = 0, 1

    def mesh(self, device: str) -> Any:
        """See `Inside`. The first call makes torch's default group, of this process alone, unless there is one.

        Raises:
            FleetError: there is one, of several processes.
        """
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        if dist.get_world_size() != 1:
            raise FleetError(
                f"torch's default group has {dist.get_world_size()} processes here, and this replica one: set "
                "fleet.shards_per_replica"
            )
        return init_device_mesh(device, (1,), mesh_dim_names=("shard",))

    def total(self, values: Tensor) -> Tensor:
        """See `Inside`."""
        return values

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Nobody else has one."""

    def agree(self, about: str, problem: str) -> str:
        """See `Inside`."""
        return problem


class Grouped:
    """One shard of several, over their gloo `group` for small messages between CPUs; whole parameters go over `data`,
    torch's group for the device that the model is on. `agree` is as in `Inside`."""

    def __init__(self, group: Any, data: Any, mesh: Any, agree: Callable[[str, str], str]) -> None:
        self._group, self._data, self._mesh, self.agree = group, data, mesh, agree
        self.shard, self.shards = group.rank(), group.size()

    def mesh(self, device: str) -> Any:
        """See `Inside`: that of the device that the group was made for."""
        return self._mesh

    def total(self, values: Tensor) -> Tensor:
        """See `Inside`.

        Raises:
            FleetError: the train function has ended the group.
        """
        if not dist.is_initialized():
            raise FleetError(
                "the process group of this replica's shards is gone: leave destroy_process_group out of the train "
                "function, the group ends with the run"
            )
        every = [torch.empty_like(values) for _ in range(self.shards)]
        dist.all_gather(every, values, group=self._group)
        total = torch.zeros_like(values)
        for one in every:
            total += one
        return total

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """See `Inside`."""
        for tensor, owner in zip(tensors, owners, strict=True):
            if tensor.numel() == 0:
                continue
            whole = tensor.contiguous()
            # as bytes: gloo knows some dtypes only
            dist.broadcast(whole.reshape(-1).view(torch.uint8), src=owner, group=self._data)
            if whole is not tensor and self.shard != owner:
                tensor.copy_(whole)
