"""Exchanges in pieces by a process group's own collectives: for NCCL, whose members have one place and fast links."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ray_lowcomm.core.staging import to_device, to_host
from ray_lowcomm.engine.combine import exchanged_at_once, weighted_sum
from ray_lowcomm.transport.deadline import Deadline

GATHERED = 1 << 22  # bytes of a message that are gathered at once


class Collectives:
    """The exchanges of one member of a process group that works on `device`, one at a time."""

    def __init__(self, pg: Any, rank: int, world: int, timeout_s: float, device: str = "cuda") -> None:
        self._pg, self._rank, self._world, self._timeout_s, self._device = pg, rank, world, timeout_s, device

    def forget(self) -> None:
        """Hold nothing of the process group any more."""
        self._pg = None

    def damage(self, bits: int) -> None:
        """Nothing here would notice: settings refuse such a fault."""

    def abort(self) -> None:
        """Fail whatever is waited for, at once; from another thread than the one that waits."""
        pg = self._pg
        if pg is not None:
            pg.abort()

    def waits_for(self) -> int | None:
        """Which rank keeps a collective waiting is not known."""
        return None

    def mean(self, flat: Tensor, weights: Sequence[float]) -> None:
        """Weighted sum in rank order, written over `flat` [n], contiguous: all-to-all of shards, sum of each at its
        owner, all-gather. What belongs to the next piece is sent meanwhile."""
        deadline, item = Deadline(self._timeout_s), flat.element_size()
        at_once = exchanged_at_once(flat.numel() * item) // item
        pieces = [piece for piece in torch.split(flat, -(-at_once // self._world) * self._world) if piece.numel()]
        ahead = deque(self._scatter(piece) for piece in pieces[:1])
        for number, piece in enumerate(pieces):
            ahead.extend(self._scatter(following) for following in pieces[number + 1 : number + 2])
            _, shards, work = ahead.popleft()
            work.wait()
            self._collect(piece, weighted_sum(shards, weights))
            deadline.check()

    def gather(self, message: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """All members' messages, uint8 of these sizes, in rank order."""
        deadline = Deadline(self._timeout_s)
        received = [message if rank == self._rank else message.new_empty(size) for rank, size in enumerate(sizes)]
        for start in range(0, max(sizes), GATHERED):
            places = [part[start : start + GATHERED] for part in received]
            arrived = self._to_each([places[self._rank]] * self._world, [len(place) for place in places])
            for rank, part in enumerate(arrived):
                if rank != self._rank:
                    places[rank].copy_(to_device(part, places[rank].device))
            deadline.check()
        return received

    def swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Part w, uint8 [bytes] on the CPU, to rank w; what this rank was sent, in rank order. Sizes go ahead."""
        given = torch.tensor([len(part) for part in parts]).to(self._device)
        taken = torch.empty_like(given)
        self._pg.alltoall_base(taken, given, [], []).wait()
        received = [to_host(part) for part in self._to_each(parts, taken.tolist())]
        received[self._rank] = parts[self._rank]
        return received

    def _to_each(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Part w to rank w; of what comes, `sizes` long, the own one is empty."""
        given = [0 if rank == self._rank else len(part) for rank, part in enumerate(parts)]
        taken = [0 if rank == self._rank else size for rank, size in enumerate(sizes)]
        sent = self._there(torch.cat([part[:length] for part, length in zip(parts, given, strict=True)]))
        received = sent.new_empty(sum(taken))
        self._pg.alltoall_base(received, sent, taken, given).wait()
        return list(received.split(taken))

    def _scatter(self, piece: Tensor) -> tuple[Tensor, list[Tensor], Any]:
        """Send each rank its shard of the piece: (what is sent, what will have come, the operation)."""
        shard = -(-piece.numel() // self._world)
        padding = shard * self._world - piece.numel()
        sent = self._there(torch.cat([piece, piece.new_zeros(padding)]) if padding else piece)
        shards = torch.empty_like(sent)
        work = self._pg.alltoall_base(shards, sent, [], [])
        return sent, list(shards.view(self._world, shard)), work

    def _collect(self, piece: Tensor, own: Tensor) -> None:
        """Put the shards of all ranks in the place of the piece."""
        parts = [torch.empty_like(own) for _ in range(self._world)]
        self._pg.allgather([parts], [own]).wait()
        for place, part in zip(torch.split(piece, len(own)), parts, strict=False):
            place.copy_(to_device(part, piece.device)[: len(place)])

    def _there(self, tensor: Tensor) -> Tensor:
        return (to_host(tensor) if self._device == "cpu" else to_device(tensor, self._device)).contiguous()
