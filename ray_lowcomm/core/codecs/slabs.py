"""Work on the chunks of a track, slab by slab, with all threads that torch may use."""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from ray_lowcomm.core.chunks import Slab

COPIES = 5  # of a slab's chunks, for which there is room
LEAST = 4  # slabs of a thread, or it is not worth its start
Result = TypeVar("Result")
Task = tuple[int, Slab]
Work = Callable[[int, Slab, Tensor], Result]


def each(tasks: Sequence[Task], like: Tensor, work: Work[Result]) -> list[Result]:
    """What `work(number, slab, room)` returns for each (number of a group, slab), in order.

    `room`, [5, at least the slab's elements] in the dtype and place of `like`, is the same for many slabs: fresh memory
    costs more than what is done in it. On the CPU slabs are spread over `torch.get_num_threads()` threads, as numpy's
    and torch's operations on one slab are too short to be. An operation inside `work` has one thread, with few slabs,
    too: replicas must get the same bits whatever threads they have. `work` keeps no graph of gradients.
    """
    size = max(((slab.stop - slab.start) * math.prod(slab.shape) for _, slab in tasks), default=0)
    if like.device.type != "cpu":
        room = like.new_empty(COPIES, size)
        return [work(number, slab, room) for number, slab in tasks]
    own, allowed = threading.local(), torch.get_num_threads()

    def one(task: Task) -> Result:
        if not hasattr(own, "room"):
            own.room = like.new_empty(COPIES, size)
        return work(*task, own.room)

    threads = min(allowed, len(tasks) // LEAST)
    try:
        if threads <= 1:
            torch.set_num_threads(1)
            return [one(task) for task in tasks]
        with ThreadPoolExecutor(threads, initializer=_alone) as pool:
            return list(pool.map(one, tasks))
    finally:
        torch.set_num_threads(allowed)  # that number is also the one for threads that others start


def _alone() -> None:
    """A thread of the pool has none of its own, or there would be threads² of them."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)  # torch's default in a new thread is another than here, perhaps
