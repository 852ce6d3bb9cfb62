"""Write the golden trajectories anew: ``python -m tests.golden.regenerate [CASE …]`` (all cases without a name).

Do this only when an algorithm is meant to behave differently, look at the differences (it prints the largest relative
one of each case), and say in the commit why they are right.
"""

import json
import sys
from typing import Any

import torch

from .trajectories import DATA, IDS, load, path, trajectory


def _numbers(data: Any) -> list[float]:
    if isinstance(data, dict):
        return [x for value in data.values() for x in _numbers(value)]
    if isinstance(data, list):
        return [x for value in data for x in _numbers(value)]
    return [float(data)] if isinstance(data, (int, float)) else []


def _change(case_id: str, new: dict[str, Any]) -> str:
    if not path(case_id).exists():
        return "new"
    old, now = _numbers(load(case_id)), _numbers(new)
    if len(old) != len(now):
        return f"{len(old)} numbers before, {len(now)} now"
    largest = max(abs(a - b) / max(abs(a), abs(b), 1e-12) for a, b in zip(old, now, strict=True))
    return f"largest relative difference {largest:.1e}"


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in IDS]
    if unknown:
        print(f"unknown case {unknown[0]!r}: known are {', '.join(IDS)}")
        return 2
    torch.set_num_threads(1)
    DATA.mkdir(exist_ok=True)
    for case_id in names or IDS:
        new = trajectory(case_id)
        print(f"{case_id}: {_change(case_id, new)}")
        path(case_id).write_text(json.dumps(new, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
