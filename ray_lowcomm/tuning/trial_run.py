"""A trial's run in a thread of the trial's process: results come out round by round, while the fleet goes on."""

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray_lowcomm.config import TrainConfig, to_yaml
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.wording import worded
from ray_lowcomm.engine.book import Event
from ray_lowcomm.engine.checkpoint import round_of, whole_checkpoints
from ray_lowcomm.engine.member import TrainLoop
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.fleet import RESUME
from ray_lowcomm.tracking.files import RunFiles
from ray_lowcomm.training import trainer_of
from ray_lowcomm.tuning.trial_checkpoint import Standing, copy_newest, write_standing
from ray_lowcomm.tuning.trial_results import Result, result_of

STOP_S = 90.0  # more than a fleet takes that must be aborted; what is left then dies with the trial's process
MANIFEST_S = 15.0
POLL_S = 0.2
NOTICES = 200


class TrialRecorder:
    """The files of a trial's run folder, and nothing else: no MLflow, no terminal. Notices go into the summary,
    and what replicas print where Ray puts it."""

    def __init__(self, config: TrainConfig, directory: str, start: int) -> None:
        self._config, self._files = config, RunFiles(directory, start)
        self._notices: deque[str] = deque(maxlen=NOTICES)

    def on_start(self, info: Mapping[str, Any]) -> None:
        """See `Recorder`."""
        self._files.config(to_yaml(self._config))

    def on_round(self, record: Mapping[str, Any]) -> None:
        """See `Recorder`."""
        self._files.round(record)

    def on_notice(self, text: str) -> None:
        """See `Recorder`."""
        self._notices.append(text)

    def on_end(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """See `Recorder`."""
        self._files.close()
        final = {**summary, "mlflow_run_id": None, "notices": list(self._notices)}
        self._files.summary(final)
        return final


class TrialRun:
    """Starts the run at once, from where `standing` says; its run folder must hold the checkpoint meant there.

    The fleet trains the next round while a result is looked at, and waits with closing it until `next` is called again.
    `next`, `save` and `stop` are for one thread.
    """

    def __init__(self, config: TrainConfig, train_loop: TrainLoop | None, standing: Standing) -> None:
        self._config, self._directory = config, f"{config.run.output_dir}/{config.run.name}"
        self._items: queue.Queue[tuple[dict[str, Any], Result] | None] = queue.Queue()
        self._taken, self._stopping = threading.Semaphore(0), False
        self._totals: Mapping[str, Any] = {}
        self._records, self._reported = list(standing.records), standing.reported
        self._error: BaseException | None = None
        self._over = standing.step >= config.inner.steps
        run = replace(config.run, resume=standing.round > 0)
        self._trainer = trainer_of(
            config.model_copy(update={"run": run}),
            lambda path, start: TrialRecorder(config, path, start),
            train_loop,
            self._on_event,
        )
        self._thread = threading.Thread(target=self._live, name="fleet", daemon=True)
        if not self._over:
            self._thread.start()

    def next(self) -> Result | None:
        """The result of the next round that Tune does not know, as soon as it is committed; None: the run is over.

        The last round's has ``done``, and comes when the run has ended and its files are whole.

        Raises:
            LowCommError: the run has failed.
        """
        result = self._take()
        while result is not None and result["outer_round"] <= self._reported:
            result = self._take()  # a round that is taken again, on the way from an older checkpoint
        if result is None:
            self._raise_failure()
            return None
        if result["step"] >= self._config.inner.steps:
            while self._take() is not None:
                pass
            self._raise_failure()
            result = {**result, "done": True}
        self._reported = result["outer_round"]
        return result

    def save(self, folder: str) -> None:
        """Put the newest whole checkpoint into `folder`, with what is needed to go on from it in Tune's eyes.

        Raises:
            CheckpointError: it cannot be copied.
        """
        self._wait_for_manifest()
        found = copy_newest(self._directory, folder)
        number, step = (found.manifest["round"], found.manifest["step"]) if found else (0, 0)
        records = tuple(record for record in self._records if record["round"] <= number)
        write_standing(folder, Standing(number, step, self._reported, records))

    def stop(self, reason: str) -> bool:
        """End the run in order, within a bounded time; whether all of it has ended."""
        self._stopping = True
        self._taken.release()
        self._trainer.stop(reason)
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        return not self._thread.is_alive()

    def _live(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._error = error
        finally:
            self._items.put(None)

    def _on_event(self, event: Event) -> None:
        if event.kind == "totals":
            self._totals = event.data
        elif event.kind == "record" and not self._stopping:
            self._items.put((event.data, result_of(event.data, self._totals)))
            self._taken.acquire()

    def _take(self) -> Result | None:
        if self._over:
            return None
        item = self._items.get()  # the end comes always: all that the run waits for has a deadline
        if item is None:
            self._over = True
            return None
        record, result = item
        while self._records and self._records[-1]["round"] >= record["round"]:
            self._records.pop()  # all replicas were lost, and rounds come again
        self._records.append(record)
        self._taken.release()
        return result

    def _raise_failure(self) -> None:
        if isinstance(self._error, FleetError):
            # a trial goes on with its sweep
            raise FleetError(str(self._error).removesuffix(worded(RESUME, "command")))
        if self._error is not None:
            raise self._error

    def _wait_for_manifest(self) -> None:
        """A checkpoint of the round that was reported last becomes whole a moment after its record."""
        every = self._config.checkpoint.every
        if self._over or not every or self._reported % every:
            return
        storage, deadline = Storage(self._directory), time.monotonic() + MANIFEST_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            whole = whole_checkpoints(storage)
            if whole and round_of(whole[-1]) >= self._reported:
                return
            time.sleep(POLL_S)
