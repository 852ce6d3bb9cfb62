"""What the driver does once the trainer has dealt with what was before: manifests, clearing away, and the end."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray_lowcomm.engine import checkpoint
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.for_trainer import ForTrainer
from ray_lowcomm.runtime.journal_file import HostState

LATER = ("manifest", "discarded", "ended")  # events that wait for the trainer, or for one another


class Due:
    """In order. `written` is told of each manifest: its folder, and what the problem was ('': none)."""

    def __init__(
        self, plan: RunPlan, host: HostState, trainer: ForTrainer, written: Callable[[str, str], None]
    ) -> None:
        self._plan, self._host, self._trainer, self._written = plan, host, trainer, written
        self._news = asyncio.Event()

    def add(self, event: Event) -> None:
        """One that is due after all events that there have been."""
        self._host.later.append((len(self._trainer), event.kind, event.data))
        self._news.set()

    async def run(self) -> None:
        """Do it, as long as the driver lives."""
        while True:
            self._news.clear()
            while self._host.later:
                after, kind, data = self._host.later[0]
                if kind == "manifest" and await self._trainer.is_handled(after):
                    await self._write_manifest(*data)
                elif kind == "discarded":
                    await asyncio.to_thread(checkpoint.discard, Storage(self._plan.directory), data)
                del self._host.later[0]
                if kind == "ended":
                    self._trainer.emit(Event(kind, data))
            await self._news.wait()

    async def _write_manifest(self, folder: str, manifest: dict[str, Any]) -> None:
        keep, problem = self._plan.checkpoint.keep, ""
        try:
            storage = Storage(self._plan.directory)
            await asyncio.to_thread(checkpoint.write_manifest, storage, folder, manifest, keep)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self._written(folder, problem)
