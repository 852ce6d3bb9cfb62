"""Random state of a replica: seeded apart for each, saved and put back whole."""

import random

import torch
from torch import Tensor


def seed_all(seed: int) -> None:
    """Seed Python's and torch's generators (CPU and every GPU)."""
    random.seed(seed)
    torch.manual_seed(seed)


def replica_seed(seed: int, index: int, start: int = 0) -> int:
    """A seed of its own for each replica and each of its starts."""
    return (seed * 1_000_003 + index * 7919 + start * 104_729 + 1) % 2**63


def random_state() -> dict[str, Tensor]:
    """State of torch's generators: uint8 tensors, ``cpu`` and, with CUDA, ``cuda``."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Put back what `random_state` returned; a state of a device that is not there is left out."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
