"""The trainer: a train function, settings, and `fit()`, on Ray or with all replicas in this process."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from ray_lowcomm import strategies
from ray_lowcomm.config import LoopConfig, LoopSettings, section
from ray_lowcomm.core.errors import FleetError, LowCommError, SettingError
from ray_lowcomm.core.settings import (
    CheckpointSettings,
    FleetSettings,
    RunSettings,
    StrategySettings,
    TrackingSettings,
)
from ray_lowcomm.core.wording import Reader, option, reworded, worded
from ray_lowcomm.engine.book import Event, RunPlan
from ray_lowcomm.engine.checkpoint import discard, resumed, write_manifest
from ray_lowcomm.engine.member import TrainLoop, describe
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.fault_schedule import FaultEntry, faults_of
from ray_lowcomm.runtime.arguments import judged
from ray_lowcomm.runtime.fired import FiredFaults
from ray_lowcomm.runtime.run_folder import RunFolder
from ray_lowcomm.runtime.stopping import signals_interrupt, stop_in_order


class Recorder(Protocol):
    """Who writes down and shows what happens in a run; what replicas print goes where Ray puts it, unless it is a
    `ShowsOutput`, too."""

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run begins."""

    def on_round(self, record: Mapping[str, Any]) -> None:
        """A round is committed; `record` is a line of rounds.jsonl."""

    def on_notice(self, text: str) -> None:
        """Something that the user should know."""

    def on_end(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The run is over; returns what summary.json holds."""
        ...


@runtime_checkable
class ShowsOutput(Protocol):
    """Who shows what replicas on Ray print."""

    def on_output(self, replica: int, lines: Sequence[str]) -> None:
        """The next lines that this replica has printed."""


@dataclass(frozen=True)
class Result:
    """What a finished run leaves: the contents of summary.json, and the run's folder."""

    summary: dict[str, Any]
    path: str


@dataclass(frozen=True)
class TrainerOptions:
    """The rarer arguments of `LowCommTrainer`.

    `tracking` are TrackingSettings or a mapping of their fields. `agreed` are further settings that must be the same on
    all replicas. `recorder` makes the recorder from the run's folder and the round it starts from; by default files,
    progress and MLflow. `on_event` is called with each event of the run, one at a time: those of the coordinator, and
    before each ``record`` of a round ``totals``, a mapping of the sums so far. The next round is not closed before it
    has returned. `reader`: for whom texts name settings, a ``command`` line's or a ``program``'s writer.
    `config` is the checked configuration that all arguments are of, if there is one.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    faults: tuple[FaultEntry, ...] = ()
    buffers: str = "average"
    state_on_sync: str = "keep"
    skip_nonfinite: bool = True
    tracking: Any = None
    agreed: Mapping[str, str] = field(default_factory=dict)
    recorder: Any = None
    on_event: Any = None
    reader: Reader = "program"
    config: Any = None

    def __post_init__(self) -> None:
        if self.buffers not in ("average", "local", "first"):
            raise SettingError("buffers", self.buffers, "must be average, local or first")
        if self.state_on_sync not in ("keep", "reset"):
            raise SettingError("state_on_sync", self.state_on_sync, "must be keep or reset")


class LowCommTrainer:
    """Trains `steps` optimizer steps per replica with a train function of your own.

    `train_loop(context)` builds model and optimizer, calls ``replica = context.wrap(model, optimizer)`` once and
    ``replica.step(loss)`` after each backward, until ``replica.finished``. Each section may be given as its settings
    class or as a mapping of its fields; `options` are the fields of `TrainerOptions`. In a placement group that has a
    bundle for each replica (as a Ray Tune trial may have) the replicas run there.

    Raises:
        SettingError: a setting that is not allowed.
    """

    def __init__(
        self,
        train_loop: TrainLoop,
        steps: int,
        *,
        strategy: StrategySettings | Mapping[str, Any] | None = None,
        fleet: FleetSettings | Mapping[str, Any] | None = None,
        run: RunSettings | Mapping[str, Any] | None = None,
        checkpoint: CheckpointSettings | Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise SettingError("steps", steps, "must be a whole number of at least 1")
        self.train_loop, self.steps = train_loop, steps
        self.strategy = strategies.resolve(section("strategy", StrategySettings, strategy), steps)
        self.fleet = section("fleet", FleetSettings, fleet)
        self.run = section("run", RunSettings, run)
        self.checkpoint = section("checkpoint", CheckpointSettings, checkpoint)
        self.options = section("LowCommTrainer", TrainerOptions, options)
        parts = {"strategy": strategy, "fleet": fleet, "run": run, "checkpoint": checkpoint, "inner": self.options}
        self._remarks = self._judged(parts | {name: options.get(name) for name in ("faults", "tracking")})
        self.faults = faults_of((self.options.config or self._config()).resolved())
        self._stopping = ""
        self._stop_fleet: Callable[[str], None] | None = None

    def fit(self) -> Result:
        """Run to the end.

        Raises:
            FleetError: the run failed; the text names the replica and the reason. What was written stays.
        """
        try:
            return self._fit()
        except LowCommError as error:
            raise reworded(error, self.options.reader) from error.__cause__

    def _fit(self) -> Result:
        with signals_interrupt(), RunFolder(self.run) as folder, ExitStack() as closing:
            recorder = self._recorder(folder)
            over = folder.finished(self.steps) if self.run.resume == "auto" else None
            if over is not None:
                recorder.on_notice(f"{folder.path} is complete: there is nothing to go on with up to step {self.steps}")
                return Result(over, folder.path)
            fired = FiredFaults(folder.path, self.faults, folder.newest is not None)
            plan = fired.told(self._plan(folder))
            recorder.on_start(self._info(folder))
            if folder.said:
                recorder.on_notice(self._worded(folder.said))
            for remark in self._remarks:
                recorder.on_notice(remark)
            listener = _Listener(recorder, self.options, plan, fired)
            try:
                self._run(listener, plan, closing)
            except BaseException as error:
                status = "failed" if isinstance(error, Exception) else "stopped"
                reason = self._worded(describe(error)) if status == "failed" else "stopped from outside"
                recorder.on_end(self._head() | {"status": status, "error": reason} | listener.summary)
                if status == "stopped":
                    recorder.on_notice(self._worded(folder.kept()))
                raise
            stopping = self._stopping or listener.stopping
            early = "stopped" if stopping else "incomplete"
            status = "failed" if listener.failure else "finished" if listener.complete else early
            reason = listener.failure or (stopping if status == "stopped" else "")
            final = recorder.on_end(self._head() | {"status": status, "error": reason} | listener.summary)
            if listener.failure:
                raise FleetError(listener.failure + listener.hint)
            return Result(dict(final), folder.path)

    def _worded(self, text: str) -> str:
        return worded(text, self.options.reader)

    def stop(self, reason: str) -> None:
        """Make a `fit` in another thread end now and in order; its result says that it was stopped, and why."""
        self._stopping = reason
        if self._stop_fleet is not None:
            self._stop_fleet(reason)

    def _run(self, listener: "_Listener", plan: RunPlan, closing: ExitStack) -> None:
        """Run; `listener.summary` is what there is to say of it, however it ends. What can wait until it has been said
        (a job that is being stopped has little time) goes to `closing`."""
        spec = self._spec(plan.directory)
        if self.fleet.transport == "local":
            from ray_lowcomm.transport.local import LocalFleet

            local = LocalFleet(plan, spec, lambda event: self._on_local_event(listener, local, event))
            try:
                with stop_in_order() as asked:
                    local.stop_wanted = asked
                    local.run(self.train_loop)
                if asked() and not listener.complete:
                    raise KeyboardInterrupt
            except _Stopped:
                return
            finally:
                # the local fleet's own clock is virtual
                listener.summary = local.coordinator.summary() | {"wall_s": listener.wall_s()}
            return
        import ray

        from ray_lowcomm.runtime.cluster import connect, surrounding_place
        from ray_lowcomm.runtime.fleet import RayFleet
        from ray_lowcomm.runtime.sending import check_sendable

        check_sendable(self.train_loop)
        if connect(self.fleet, prints=listener.shown is None):
            closing.callback(ray.shutdown)
        in_step = self.options.on_event is not None
        place, shown = surrounding_place(self.fleet), listener.shown is not None
        fleet = RayFleet(plan, spec, listener.on_event, place, in_step, shown)
        self._stop_fleet = fleet.stop
        try:
            if self._stopping:
                fleet.stop(self._stopping)
            fleet.run(self.train_loop)
        finally:
            self._stop_fleet = None
            listener.summary = fleet.summary or listener.last_known()

    def _on_local_event(self, listener: "_Listener", local: Any, event: Event) -> None:
        if self._stopping:
            raise _Stopped
        if event.kind == "record":
            listener.on_event(Event("totals", local.coordinator.book.totals.summary()))
        listener.on_event(event)
        if event.kind == "manifest":
            self._write_manifest(local, event.data[0], event.data[1], listener.wall_s())
        elif event.kind == "discarded":
            discard(Storage(local.coordinator.fleet.plan.directory), event.data)

    def _write_manifest(self, local: Any, folder: str, manifest: dict[str, Any], wall_s: float) -> None:
        """As the driver does on Ray."""
        problem = ""
        try:
            manifest = manifest | {"totals": manifest["totals"] | {"wall_s": wall_s}}
            storage = Storage(local.coordinator.fleet.plan.directory)
            write_manifest(storage, folder, manifest, self.checkpoint.keep)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        local.coordinator.manifest_written(folder, problem)

    def _recorder(self, folder: RunFolder) -> Recorder:
        start = folder.newest.manifest["round"] if folder.newest else 0
        if self.options.recorder is not None:
            made: Recorder = self.options.recorder(folder.path, start)
            return made
        from ray_lowcomm.tracking.recorder import Recorder as FullRecorder

        return FullRecorder(self._config(), folder.path, start)

    def _config(self) -> LoopConfig:
        options = self.options
        return LoopConfig(
            run=self.run,
            checkpoint=self.checkpoint,
            inner=LoopSettings(self.steps, options.buffers, options.state_on_sync, options.skip_nonfinite),
            strategy=self.strategy,
            fleet=self.fleet,
            faults=list(options.faults),
            tracking=section("tracking", TrackingSettings, options.tracking),
        )

    def _judged(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """What is to be said of the settings; SettingError for one that was given and has no effect."""
        if self.options.recorder is not None and self.options.tracking is not None:
            raise SettingError(
                "tracking", self.options.tracking, "has no effect with a recorder of your own: leave it out"
            )
        checked = self.options.config
        said: tuple[str, ...] = judged(self._config(), arguments) if checked is None else checked.remarks()
        return said

    def _head(self) -> dict[str, Any]:
        return {"run_name": self.run.name, "strategy": self.strategy.name}

    def _info(self, folder: RunFolder) -> dict[str, Any]:
        info: dict[str, Any] = {"replicas": self.fleet.size, "steps": self.steps, "transport": self.fleet.transport}
        if folder.newest is not None:
            manifest = folder.newest.manifest
            info |= {"resumed from round": manifest["round"], "step": manifest["step"]}
        return info

    def _plan(self, folder: RunFolder) -> RunPlan:
        plan = RunPlan(
            run=self.run,
            checkpoint=self.checkpoint,
            strategy=self.strategy,
            fleet=self.fleet,
            total=self.steps,
            directory=folder.path,
        )
        if folder.newest is None:
            return plan
        done = folder.newest.manifest["step"]
        if done >= self.steps:
            raise FleetError(f"{folder.path} is complete at step {done}: raise {option('inner.steps')} to train on")
        return resumed(plan, folder.newest)

    def _spec(self, directory: str) -> RunSpec:
        options = self.options
        return RunSpec(
            strategy=self.strategy,
            steps=self.steps,
            directory=directory,
            run=self.run,
            checkpoint=self.checkpoint,
            fleet=self.fleet,
            faults=self.faults,
            buffers=options.buffers,
            state_on_sync=options.state_on_sync,
            skip_nonfinite=options.skip_nonfinite,
            agreed=options.agreed,
        )


class _Stopped(BaseException):
    """Ends a local fleet from within its events: they come from the replicas' threads, where nobody may catch it."""


class _Listener:
    """Passes the coordinator's events on to the recorder, and keeps how the run failed."""

    def __init__(self, recorder: Recorder, options: TrainerOptions, plan: RunPlan, fired: FiredFaults) -> None:
        self._fired, self._known = fired, dict[str, Any]()
        self._recorder, self._watch, self._reader = recorder, options.on_event, options.reader
        self._directory = plan.directory
        before: float = plan.restored["totals"]["wall_s"] if plan.restored else 0.0
        self._began = time.monotonic() - before
        self.shown = recorder if isinstance(recorder, ShowsOutput) else None
        self.failure = self.hint = self.stopping = ""
        self.complete = False
        self.summary: dict[str, Any] = {}

    def wall_s(self) -> float:
        """Seconds that the run has taken, those before a resume included."""
        return round(time.monotonic() - self._began, 3)

    def last_known(self) -> dict[str, Any]:
        """What a summary can say without the driver."""
        return self._known | {"wall_s": self.wall_s()} if self._known else {}

    def on_event(self, event: Event) -> None:
        self._record(event)
        if self._watch is not None:
            self._watch(event)

    def _record(self, event: Event) -> None:
        if event.kind == "record":
            self._known |= {"rounds": event.data["round"]}
            self._fired.write()
            self._recorder.on_round(event.data)
        elif event.kind == "totals":
            self._known |= event.data
        elif event.kind == "fired":
            self._fired.add(event.data)
        elif event.kind == "notice":
            self._recorder.on_notice(worded(event.data, self._reader))
        elif event.kind == "output" and self.shown is not None:
            self.shown.on_output(*event.data)
        elif event.kind == "start_loss" and event.data is not None:
            self._recorder.on_notice(f"validation loss before training: {event.data:.4f}")
        elif event.kind == "stopped":
            self.stopping = event.data
        elif event.kind == "ended":
            self.complete = event.data
        elif event.kind == "failed":
            self.failure, traceback = worded(event.data[0], self._reader), event.data[1]
            if traceback and "://" not in self._directory:
                path = Path(self._directory, "error.txt")
                with suppress(OSError):
                    path.write_text(traceback)
                    self.hint = f" (traceback in {path})"


__all__ = ["LowCommTrainer", "Recorder", "Result", "TrainerOptions"]
