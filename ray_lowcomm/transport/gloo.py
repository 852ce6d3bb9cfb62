"""Process groups of gloo that are bound to one address, and listen no longer than it takes to form them."""

import contextlib
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ray_lowcomm.transport import ports


def form_gloo(store: dist.Store, rank: int, world: int, host: str, timeout: timedelta) -> Any:
    """The group's member number `rank` of `world`, which the others reach at the address `host`."""
    gloo_class: Any = dist.ProcessGroupGloo  # its options are private, and there is no other way to set them
    gloo = gloo_class._Options()
    gloo._timeout, gloo._threads = timeout, 2
    gloo._devices = [gloo_class.create_device(hostname=host, lazy_init=False)]
    pg = gloo_class(store, rank, world, gloo)
    announced = f"0/{rank}"  # where gloo says at which address it listens
    if store.check([announced]):
        with contextlib.suppress(OSError):  # a sandbox may forbid it: then `Vote.strays` grows
            ports.shut(store.get(announced))
    return pg
