"""Random state of a replica: seeded apart for each, saved and put back whole."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

Snapshot = tuple[Any, Any, Tensor]


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's global and torch's generators (CPU and every GPU)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def replica_seed(seed: int, index: int, start: int = 0, shard: int = 0) -> int:
    """A seed of its own for each replica, each of its starts and each of its shards."""
    return (seed * 1_000_003 + index * 7919 + start * 104_729 + shard * 15_485_863 + 1) % 2**63


def snapshot() -> Snapshot:
    """State of Python's, numpy's and torch's CPU generators, to be put back in this process."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def put_back(state: Snapshot) -> None:
    """Put back what `snapshot` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def random_state() -> dict[str, Tensor]:
    """All generators' states as tensors, for a checkpoint: ``python``, ``numpy``, ``cpu`` and, with CUDA, ``cuda``."""
    _, words, gauss = random.getstate()
    kind = np.random.get_state(legacy=False)
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.from_numpy(kind["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([kind["state"]["pos"], kind["has_gauss"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor(kind["gauss"], dtype=torch.float64),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Put back what `random_state` returned; a state of a device that is not there is left out."""
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    key = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
