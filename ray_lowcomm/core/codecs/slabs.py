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
    and torch's operations on one slab are too short to be; what comes out does not depend on their number.
    """
    size = max(((slab.stop - slab.start) * math.prod(slab.shape) for _, slab in tasks), default=0)
    allowed = torch.get_num_threads() if like.device.type == "cpu" else 1
    threads = min(allowed, len(tasks) // LEAST)
    if threads <= 1:
        room = like.new_empty(COPIES, size)
        return [work(number, slab, room) for number, slab in tasks]
    own = threading.local()

    def one(task: Task) -> Result:
        if not hasattr(own, "room"):
            own.room = like.new_empty(COPIES, size)
        return work(*task, own.room)

    try:
        # of its own threads each thread may use one, or there would be threads² of them
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(one, tasks))
    finally:
        torch.set_num_threads(allowed)  # that number is also the one for threads that others start
