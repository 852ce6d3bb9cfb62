"""Faults of a schedule that have happened, as the run's folder keeps them: a resume does not repeat them."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from ray_lowcomm.core.settings import Fault
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.storage import Storage

FIRED = "faults_fired.json"


class FiredFaults:
    """Those of the run in `directory`, whose schedule is `faults` now; earlier it may have been another."""

    def __init__(self, directory: str, faults: Sequence[Fault], resumed: bool) -> None:
        self._directory, self._faults = directory, faults
        self._entries: list[dict[str, Any]] = []
        self._known = self._unwritten = False
        storage = Storage(directory)
        if resumed and storage.exists(FIRED):
            with suppress(ValueError):
                self._entries, self._known = list(json.loads(storage.read(FIRED))), True

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which entries of the schedule have happened."""
        left = list(self._entries)
        found = []
        for number, fault in enumerate(self._faults):
            if asdict(fault) in left:
                left.remove(asdict(fault))
                found.append(number)
        return tuple(found)

    def told(self, plan: RunPlan) -> RunPlan:
        """With what has happened since its checkpoint, too: numbers in that are of the schedule of its time."""
        if plan.restored is None or not self._known:
            return plan
        return replace(plan, restored=plan.restored | {"fired": list(self.numbers)})

    def add(self, number: int) -> None:
        """This entry of the schedule happens now."""
        self._entries.append(asdict(self._faults[number]))
        self._unwritten = True
        self.write()

    def write(self) -> None:
        """Write what is not written yet; a full disk is told of by others."""
        if self._unwritten:
            with suppress(OSError):
                Storage(self._directory).write(FIRED, json.dumps(self._entries, indent=1).encode())
                self._unwritten = False
