"""The collective backend LOWCOMM for `ray.util.collective`: stand-alone process groups with deadlines.

Ray's own GLOO backend is torch.distributed's world in disguise: its timeout bounds only the rendezvous, and survivors
of a death cannot form a new group. Here each group is a ProcessGroupGloo (or ProcessGroupNCCL) of its own over the TCP
store of its rank 0, so any membership can form a group beside others, with a timeout on every operation.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from ray.util import collective
from ray.util.collective import types
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from torch import Tensor

from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.core.staging import to_device, to_host
from ray_lowcomm.engine.combine import exchanged_at_once, weighted_sum, weighted_sum_

BACKEND = "LOWCOMM"
POLL_S = 0.02
ASK_S = 0.5
GATHERED = 1 << 22  # bytes of a message that are gathered at once
OPERATIONS = 2  # timeouts that an exchange of one payload may take: all-to-all and all-gather
_REDUCE: dict[Any, Any] = {
    types.ReduceOp.SUM: dist.ReduceOp.SUM,
    types.ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    types.ReduceOp.MIN: dist.ReduceOp.MIN,
    types.ReduceOp.MAX: dist.ReduceOp.MAX,
}


@dataclass(frozen=True)
class Rendezvous:
    """How the members of one group find each other: the store of rank 0, and until when they try.

    `still_on` is asked while members are missing: a group that will never be complete is left before the deadline.
    """

    store: dist.Store
    host: str  # address of this process that the others can reach
    timeout_s: float
    still_on: Callable[[], bool]
    nccl: bool = False


class Pending:
    """An operation in flight; `wait` returns its result or raises ExchangeError at the group's timeout."""

    def __init__(self, group: "LowCommGroup", work: Any, result: Callable[[], Any]) -> None:
        self._group, self._work, self._result = group, work, result

    def wait(self) -> Any:
        """The result."""
        with self._group.destroyed_on_error():
            if self._work is not None:
                self._work.wait()
            return self._result()


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
        self._nccl = meeting.nccl
        self._timeout_s = meeting.timeout_s
        self._pg: Any = None
        if world_size > 1:
            with self.destroyed_on_error():
                self._pg = _form(world_size, rank, group_name, meeting)

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
        if self._pg is not None:
            self._pg.abort()
        self._pg = None

    def destroyed_on_error(self) -> "_DestroyedOnError":
        """Context in which any error destroys the group and comes out as ExchangeError."""
        return _DestroyedOnError(self)

    # ---- what the exchange uses -----------------------------------------------------------------------------------

    def mean(self, flat: Tensor, weights: tuple[float, ...]) -> Pending:
        """Weighted sum in rank order, equal to the bit on all members, of a floating vector [n], contiguous, which it
        takes the place of: after an error the vector holds some of both.

        All-to-all of shards, sum of each at its owner, all-gather: a ring's volume, 2·(W−1)/W of the vector each way.
        It goes piece by piece, and what belongs to the next piece is sent meanwhile.
        """
        if self.world_size == 1:
            return Pending(self, None, lambda: self._alone(flat, weights))
        return Pending(self, None, lambda: self._mean(flat, weights))

    def gather(self, message: Tensor, sizes: tuple[int, ...]) -> Pending:
        """All members' messages, uint8, in rank order. gloo gathers equal sizes only: shorter ones travel padded."""
        if self.world_size == 1:
            return Pending(self, None, lambda: (message,))
        return Pending(self, None, lambda: self._gather(message, sizes))

    def first(self, message: Tensor) -> Pending:
        """The message, uint8, of rank 0."""
        if self.world_size == 1:
            return Pending(self, None, lambda: message)
        held = self._staged(message.clone())
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._start(lambda pg: pg.broadcast([held], options))
        return Pending(self, work, lambda: held.to(message.device))

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part w, uint8 [bytes] on the CPU, to rank w; what this rank was sent, in rank order. Sizes go ahead."""
        if self.world_size == 1:
            return list(parts)
        rank = self.rank
        given = [0 if i == rank else len(part) for i, part in enumerate(parts)]
        sizes = self._staged(torch.tensor(given))
        theirs = torch.empty_like(sizes)
        self._finish(lambda pg: pg.alltoall_base(theirs, sizes, [], []))
        taken = theirs.tolist()
        sent = self._staged(torch.cat([part for i, part in enumerate(parts) if i != rank]))
        received = sent.new_empty(sum(taken))
        self._finish(lambda pg: pg.alltoall_base(received, sent, taken, given))
        pieces = list(to_host(received).split(taken))
        pieces[rank] = parts[rank]
        return pieces

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

    def _mean(self, flat: Tensor, weights: tuple[float, ...]) -> Tensor:
        pieces = [piece for piece in torch.split(flat, self._piece(flat.numel())) if piece.numel()]
        ahead = deque(self._scatter(piece) for piece in pieces[:1])
        until = time.monotonic() + OPERATIONS * self._timeout_s
        for number, piece in enumerate(pieces):
            ahead.extend(self._scatter(following) for following in pieces[number + 1 : number + 2])
            _, shards, work = ahead.popleft()
            work.wait()
            own = weighted_sum(shards, weights)
            self._collect(piece, own)
            self._must_be_in_time(until)
        return flat

    def _alone(self, flat: Tensor, weights: tuple[float, ...]) -> Tensor:
        weighted_sum_(flat, [flat], weights)
        return flat

    def _piece(self, numel: int) -> int:
        """Elements of a piece: a multiple of the number of members."""
        return -(-exchanged_at_once(numel) // self.world_size) * self.world_size

    def _scatter(self, piece: Tensor) -> tuple[Tensor, list[Tensor], Any]:
        """Send each rank its shard of the piece: (what is sent, what will have come, the operation)."""
        shard = -(-piece.numel() // self.world_size)
        padding = shard * self.world_size - piece.numel()
        sent = self._staged(torch.cat([piece, piece.new_zeros(padding)]) if padding else piece)
        shards = torch.empty_like(sent)
        work = self._start(lambda pg: pg.alltoall_base(shards, sent, [], []))
        return sent, list(shards.view(self.world_size, shard)), work

    def _collect(self, piece: Tensor, own: Tensor) -> None:
        """Put the shards of all ranks in the place of the piece."""
        places = torch.split(piece, len(own))
        whole = len(places) == self.world_size and len(places[-1]) == len(own) and piece.device == own.device
        parts = self._parts_of_all(own, list(places) if whole else None)
        for place, part in zip(places, () if whole else parts, strict=False):
            place.copy_(to_device(part, piece.device)[: len(place)])

    def _gather(self, message: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        received = [message if rank == self.rank else message.new_empty(size) for rank, size in enumerate(sizes)]
        until = time.monotonic() + OPERATIONS * self._timeout_s
        for start in range(0, max(sizes), GATHERED):
            length = min(GATHERED, max(sizes) - start)
            piece = message[start : start + length]
            padded = torch.cat([piece, piece.new_zeros(length - len(piece))]) if len(piece) < length else piece
            for rank, part in enumerate(self._parts_of_all(self._staged(padded))):
                if rank != self.rank:
                    place = received[rank][start : start + length]
                    place.copy_(part[: len(place)])
            self._must_be_in_time(until)
        return tuple(received)

    def _parts_of_all(self, own: Tensor, parts: list[Tensor] | None = None) -> list[Tensor]:
        """Tensors of equal shape in rank order, in `parts` if given."""
        into = [torch.empty_like(own) for _ in range(self.world_size)] if parts is None else parts
        self._start(lambda pg: pg.allgather([into], [own])).wait()
        return into

    def _must_be_in_time(self, until: float) -> None:
        if time.monotonic() > until:
            raise ExchangeError(f"the exchange was not through after {OPERATIONS * self._timeout_s:.0f} s")

    def _start(self, operation: Callable[[Any], Any]) -> Any:
        with self.destroyed_on_error():
            if self._pg is None:
                raise ExchangeError(f"group {self.group_name} has been destroyed")
            return operation(self._pg)

    def _finish(self, operation: Callable[[Any], Any]) -> None:
        if self.world_size > 1:
            Pending(self, self._start(operation), lambda: None).wait()

    def _staged(self, tensor: Tensor) -> Tensor:
        """Where the process group can take it: gloo works on the CPU, NCCL on the GPU."""
        return (to_device(tensor, "cuda") if self._nccl else to_host(tensor)).contiguous()


class _DestroyedOnError:
    def __init__(self, group: LowCommGroup) -> None:
        self._group = group

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        self._group.destroy_group()
        if isinstance(error, Exception) and not isinstance(error, ExchangeError):
            reason = str(error).splitlines()[0][:300] if str(error) else ""
            raise ExchangeError(f"{type(error).__name__}: {reason}") from error


def _op_of(options: Any) -> Any:
    return getattr(options, "reduceOp", types.ReduceOp.SUM)


def _form(world: int, rank: int, name: str, meeting: Rendezvous) -> Any:
    """The process group, once all members have said in the store that they are there."""
    deadline = time.monotonic() + meeting.timeout_s
    store = dist.PrefixStore(name, meeting.store)
    store.set(f"ready/{rank}", "1")
    keys = [f"ready/{r}" for r in range(world)]
    asked = time.monotonic()
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            raise ExchangeError(f"ranks {missing} did not come to group {name} within {meeting.timeout_s:.0f} s")
        if time.monotonic() - asked > ASK_S:
            asked = time.monotonic()
            if not meeting.still_on():
                raise ExchangeError(f"group {name} was given up: a member was lost")
        time.sleep(POLL_S)
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if meeting.nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    gloo_class: Any = dist.ProcessGroupGloo  # its options are private, and there is no other way to set a timeout
    gloo = gloo_class._Options()
    gloo._timeout, gloo._threads = timeout, 2
    gloo._devices = [gloo_class.create_device(hostname=meeting.host, lazy_init=False)]
    return gloo_class(store, rank, world, gloo)


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
