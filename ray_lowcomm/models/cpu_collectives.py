"""What FSDP2 does between CPUs, with less memory than torch's own way, and less to send.

gloo's all-gather makes a copy of all that it gathers, and its reduce-scatter is an all-reduce of a copy, of which each
process throws most away. Here every process sends each other one what that one needs, from where it lies. On the CPU
nothing of FSDP2's runs beside anything else, so what it would keep for that is let go at once.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOM = 1 << 23  # bytes of others' parts that are received at once, to be added up
AHEAD = 2  # pieces of each other process that are awaited at a time


def use_less_memory(module: nn.Module) -> None:
    """Have a module that `fully_shard` was applied to, and whose parameters are on the CPU, use these collectives."""
    wrapped: Any = module
    wrapped.set_custom_all_gather(AllGather())
    wrapped.set_custom_reduce_scatter(ReduceScatter())
    # the next block is gathered when its turn comes: before, it would take memory and save no time
    wrapped.set_modules_to_backward_prefetch([wrapped])


class _Allocating:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered or reduced."""
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocating):
    """Equal parts of all processes of a group, in rank order."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """`input_tensor` [n] of rank r becomes rows r·n to (r + 1)·n of `output_tensor` [W·n], where it may lie."""
        rank, parts = group.rank(), output_tensor.chunk(group.size())
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        others = _others(group)
        _wait([_receive(parts[other], other, group) for other in others] + _send([input_tensor] * len(parts), group))


class ReduceScatter(_Allocating):
    """The sum of what all processes of a group have, or its mean, of which each gets its part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Part r [n] of all ranks' `input_tensor` [W·n], added up in rank order, becomes rank r's `output_tensor` [n].
        The memory of `input_tensor` is given back: FSDP2 would keep it until the next one is made.

        Raises:
            ValueError: `op` is neither a sum nor a mean.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"reduce-scatter of {op}: must be a sum or a mean")
        world, rank = group.size(), group.rank()
        size = max(1, ROOM // (AHEAD * (world - 1) * input_tensor.element_size()))
        parts = [part.split(size) for part in input_tensor.chunk(world)]
        sent = [work for pieces in zip(*parts, strict=True) for work in _send(pieces, group)]
        coming: deque[tuple[list[Tensor], list[dist.Work]]] = deque()
        for k, total in enumerate(output_tensor.split(size)):
            for ahead in parts[rank][k + len(coming) : k + AHEAD]:
                coming.append(_receive_like(ahead, group))
            received, works = coming.popleft()
            _wait(works)
            received.insert(rank, parts[rank][k])
            torch.add(received[0], received[1], out=total)
            for one in received[2:]:
                total.add_(one)
            if op == dist.ReduceOp.AVG:
                total.div_(world)
        _wait(sent)
        input_tensor.untyped_storage().resize_(0)


def _others(group: dist.ProcessGroup) -> list[int]:
    """Their ranks in the group, in order."""
    return [other for other in range(group.size()) if other != group.rank()]


def _send(parts: Sequence[Tensor], group: dist.ProcessGroup) -> list[dist.Work]:
    """Part r to each other rank r."""
    return [_posted(dist.isend(parts[other], group=group, group_dst=other)) for other in _others(group)]


def _receive(place: Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    return _posted(dist.irecv(place, group=group, group_src=source))


def _receive_like(own: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], list[dist.Work]]:
    """What all others send, as large as `own`, in rank order, once all has been waited for."""
    received = [torch.empty_like(own) for _ in _others(group)]
    return received, [_receive(place, other, group) for place, other in zip(received, _others(group), strict=True)]


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is of the group"
    return work


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
