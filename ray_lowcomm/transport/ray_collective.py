"""The collective backend LOWCOMM for `ray.util.collective`: stand-alone process groups with deadlines.

Ray's own GLOO backend is torch.distributed's world in disguise: its timeout bounds only the rendezvous, and survivors
of a death cannot form a new group. Here each group is a ProcessGroupGloo (or ProcessGroupNCCL) of its own, over a store
of its own, so any membership can form a group beside others, with a timeout on every operation.
"""

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol, TypeVar

import torch.distributed as dist
from ray.util import collective
from ray.util.collective import types
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from torch import Tensor

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.engine.combine import weighted_sum_
from ray_lowcomm.transport.collectives import Collectives
from ray_lowcomm.transport.gloo import form_gloo
from ray_lowcomm.transport.lanes import Lanes
from ray_lowcomm.transport.pairs import Pairs

BACKEND = "LOWCOMM"
Result = TypeVar("Result")
_REDUCE: dict[Any, Any] = {
    types.ReduceOp.SUM: dist.ReduceOp.SUM,
    types.ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    types.ReduceOp.MIN: dist.ReduceOp.MIN,
    types.ReduceOp.MAX: dist.ReduceOp.MAX,
}


@dataclass(frozen=True)
class Rendezvous:
    """How the members of one group find each other: a store of this group alone, and until when they try."""

    store: dist.Store
    host: str  # address of this process that the others can reach
    timeout_s: float
    nccl: bool = False


class Exchanges(Protocol):
    """What a process group is asked for. One at a time, and none after an error."""

    def mean(self, flat: Tensor, weights: Sequence[float]) -> None:
        """Weighted sum in rank order, written over `flat` [n], contiguous."""
        ...

    def gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """All members' messages, uint8 of these sizes, in rank order."""
        ...

    def swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part w, uint8 [bytes] on the CPU, to rank w; what this rank was sent, in rank order."""
        ...

    def abort(self) -> None:
        """Fail whatever is waited for, at once; from another thread than the one that waits."""
        ...

    def waits_for(self) -> int | None:
        """The rank that this exchange has waited for during most of its time so far; None: no single one, or it is not
        known. From another thread."""
        ...

    def damage(self, bits: int) -> None:
        """Flip so many bits of what is sent next, for a fault schedule."""
        ...

    def forget(self) -> None:
        """Hold nothing of the process group any more."""
        ...


class LowCommGroup(BaseGroup):
    """A group of W members. Every operation has a timeout; after any error the group is destroyed at once.

    The last point matters: a member that is not a neighbour of a dead one fails only at the timeout, unless those that
    did notice close their connections.
    """

    # Ray hands a backend only (world, rank, name); the rest waits here under the group's name
    rendezvous: ClassVar[dict[str, Rendezvous]] = {}

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        meeting = self.rendezvous.pop(group_name)
        self._store = meeting.store  # of which torch holds only the half that is written in C++
        self._pg: Any = None
        self._exchanges: Exchanges | None = None
        if world_size > 1:
            with self.destroyed_on_error():
                self._pg = _form(world_size, rank, group_name, meeting)
                self._exchanges = _exchanges(self._pg, rank, world_size, meeting)

    @classmethod
    def backend(cls) -> str:
        """Name under which the backend is registered."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Gloo comes with every build of torch."""
        return bool(dist.is_gloo_available())

    def destroy_group(self) -> None:
        """Close all connections; the other members' operations fail at once. May be called twice."""
        if self._exchanges is not None:
            self._exchanges.forget()  # or connections would live on with the operations on them
        if self._pg is not None:
            self._pg.abort()
        self._pg = self._exchanges = None

    def destroyed_on_error(self) -> "_DestroyedOnError":
        """Context in which any error destroys the group and comes out as ExchangeError."""
        return _DestroyedOnError(self)

    # ---- what the exchange uses -----------------------------------------------------------------------------------

    def mean(self, flat: Tensor, weights: tuple[float, ...]) -> Tensor:
        """Weighted sum in rank order, equal to the bit on all members, of a floating vector [n], contiguous, which it
        takes the place of: after an error the vector holds some of both."""
        if self.world_size == 1:
            weighted_sum_(flat, [flat], weights)
        else:
            self._exchange(lambda exchanges: exchanges.mean(flat, weights))
        return flat

    def gather(self, message: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """All members' messages, uint8 of these sizes, in rank order."""
        if self.world_size == 1:
            return (message,)
        return tuple(self._exchange(lambda exchanges: exchanges.gather(message, sizes)))

    def first(self, message: Tensor) -> Tensor:
        """The message, uint8, equally long on all members, of rank 0."""
        sizes = [len(message)] + [0] * (self.world_size - 1)
        return self.gather(message if self.rank == 0 else message[:0], sizes)[0]

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part w, uint8 [bytes] on the CPU, to rank w; what this rank was sent, in rank order. Sizes go ahead."""
        return list(parts) if self.world_size == 1 else self._exchange(lambda exchanges: exchanges.swap(parts))

    def abort(self) -> None:
        """Fail the exchange that another thread waits for, at once."""
        exchanges = self._exchanges
        if exchanges is not None:
            exchanges.abort()

    def damage(self, bits: int) -> None:
        """See `Exchanges`."""
        if self._exchanges is not None:
            self._exchanges.damage(bits)

    def waits_for(self) -> int | None:
        """See `Exchanges`."""
        exchanges = self._exchanges
        return None if exchanges is None else exchanges.waits_for()

    # ---- what ray.util.collective promises ------------------------------------------------------------------------

    def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
        """In place; SUM unless the options say otherwise."""
        options = dist.AllreduceOptions()
        options.reduceOp = _REDUCE[_op_of(allreduce_options)]
        self._finish(lambda pg: pg.allreduce(tensor, options))

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all members."""
        self._finish(lambda pg: pg.barrier())

    def reduce(self, tensor: Any, reduce_options: Any = None) -> None:
        """In place at the root."""
        options = dist.ReduceOptions()
        options.reduceOp = _REDUCE[_op_of(reduce_options)]
        options.rootRank = getattr(reduce_options, "root_rank", 0)
        self._finish(lambda pg: pg.reduce(tensor, options))

    def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
        """In place, from the root."""
        options = dist.BroadcastOptions()
        options.rootRank = getattr(broadcast_options, "root_rank", 0)
        self._finish(lambda pg: pg.broadcast(tensor, options))

    def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
        """Every member's tensor, in rank order."""
        if self._pg is None and self.world_size == 1:
            tensor_list[0][0].copy_(tensor[0])
        self._finish(lambda pg: pg.allgather(tensor_list, tensor))

    def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = None) -> None:
        """This member's part of the reduced list."""
        if self.world_size == 1:
            tensor[0].copy_(tensor_list[0][0])
        options = dist.ReduceScatterOptions()
        options.reduceOp = _REDUCE[_op_of(reducescatter_options)]
        self._finish(lambda pg: pg.reduce_scatter(tensor, tensor_list, options))

    def send(self, tensor: Any, send_options: Any) -> None:
        """To `dst_rank`."""
        self._finish(lambda pg: pg.send(tensor, send_options.dst_rank, 0))

    def recv(self, tensor: Any, recv_options: Any) -> None:
        """From `src_rank`."""
        self._finish(lambda pg: pg.recv(tensor, recv_options.src_rank, 0))

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _exchange(self, operation: Callable[[Exchanges], Result]) -> Result:
        with self.destroyed_on_error():
            return operation(self._there(self._exchanges))

    def _finish(self, operation: Callable[[Any], Any]) -> None:
        if self.world_size > 1:
            with self.destroyed_on_error():
                operation(self._there(self._pg)).wait()

    def _there(self, what: Result | None) -> Result:
        if what is None:
            raise ExchangeError(f"group {self.group_name} has been destroyed")
        return what


class _DestroyedOnError:
    def __init__(self, group: LowCommGroup) -> None:
        self._group = group

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        self._group.destroy_group()
        if isinstance(error, Exception) and not isinstance(error, ExchangeError):
            raise ExchangeError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """In a line, without gloo's place in its source and its advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+\.(?:cc|cpp|h):\d+\] ", "", lines[0]).partition(". This is typically caused")[0][:300]


def _op_of(options: Any) -> Any:
    return getattr(options, "reduceOp", types.ReduceOp.SUM)


def _exchanges(pg: Any, rank: int, world: int, meeting: Rendezvous) -> Exchanges:
    if meeting.nccl:
        return Collectives(pg, rank, world, meeting.timeout_s)
    return Pairs(Lanes(pg, rank, world, meeting.timeout_s))


def _form(world: int, rank: int, name: str, meeting: Rendezvous) -> Any:
    """The process group, once all members have said in the store that they are there."""
    deadline = time.monotonic() + meeting.timeout_s
    store = meeting.store
    keys = [f"ready/{r}" for r in range(world)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, timedelta(seconds=meeting.timeout_s))
    except dist.DistStoreError as error:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        late = f"ranks {missing} did not come to group {name} within {meeting.timeout_s:.0f} s"
        raise ExchangeError(late) from error
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if meeting.nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    return form_gloo(store, rank, world, meeting.host, timeout)


_registering = threading.Lock()


def open_group(name: str, world: int, rank: int, meeting: Rendezvous) -> LowCommGroup:
    """Form a group through ray.util.collective.

    Raises:
        ExchangeError: not all members came; nothing of the group is left.
    """
    from ray.util.collective.backend_registry import _global_registry

    with _registering:
        if not _global_registry.is_registered(BACKEND):
            register_collective_backend(BACKEND, LowCommGroup)
    LowCommGroup.rendezvous[name] = meeting
    backend: Any = BACKEND  # Ray's annotation knows only its own backends
    collective.init_collective_group(world, rank, backend, name)
    group: LowCommGroup = collective.get_group_handle(name)
    return group


def close_group(group: LowCommGroup) -> None:
    """Destroy a group and forget its name."""
    group.destroy_group()
    if collective.is_group_initialized(group.group_name):
        collective.destroy_collective_group(group.group_name)
