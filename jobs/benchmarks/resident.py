"""Resident memory of this process, as Linux gives it."""

import ctypes
from pathlib import Path

MMAP_THRESHOLD = -3  # of mallopt(3)
RESIDENT, PEAK = "VmRSS", "VmHWM"


def forget_peak() -> None:
    """The high-water mark starts anew. OSError where the system does not let us."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back_at_once() -> None:
    """Have the C library give large blocks back to the system, or memory that is free would count as taken."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 16)


def of_this_process(field: str) -> int:
    """Bytes; `field` is RESIDENT or PEAK."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
