"""The trainer: a train function, settings, and `fit()`, on Ray or with all replicas in this process."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ray_lowcomm import strategies
from ray_lowcomm.config import LoopConfig, LoopSettings, flatten, section
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
from ray_lowcomm.runtime.listener import Listener, Recorder, ShowsOutput
from ray_lowcomm.runtime.run_folder import RunFolder
from ray_lowcomm.runtime.stopping import signals_interrupt, stop_in_order

FREE = ("run.resume", "fleet.address", "tracking.uri")  # settings that who takes a fleet over may change


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
        with signals_interrupt(), ExitStack() as closing, self._folder(closing) as folder:
            recorder = self._recorder(folder)
            over = folder.finished(self.steps) if self.run.resume == "auto" and not folder.living else None
            if over is not None:
                recorder.on_notice(f"{folder.path} is complete: there is nothing to go on with up to step {self.steps}")
                return Result(over, folder.path)
            fired = FiredFaults(folder.path, self.faults, folder.goes_on)
            plan = fired.told(self._plan(folder))
            recorder.on_start(self._info(folder))
            if folder.said:
                recorder.on_notice(self._worded(folder.said))
            for remark in self._remarks:
                recorder.on_notice(remark)
            listener = Listener(recorder, self.options.on_event, self.options.reader, plan, fired)
            try:
                self._run(listener, folder, plan, closing)
            except BaseException as error:
                status = "failed" if isinstance(error, Exception) else "stopped"
                reason = self._worded(describe(error)) if status == "failed" else "stopped from outside"
                recorder.on_end(plan.head | {"status": status, "error": reason} | listener.summary)
                if status == "stopped":
                    recorder.on_notice(self._worded(folder.kept()))
                raise
            stopping = self._stopping or listener.stopping
            early = "stopped" if stopping else "incomplete"
            status = "failed" if listener.failure else "finished" if listener.complete else early
            reason = listener.failure or (stopping if status == "stopped" else "")
            final = recorder.on_end(plan.head | {"status": status, "error": reason} | listener.summary)
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

    def _run(self, listener: Listener, folder: RunFolder, plan: RunPlan, closing: ExitStack) -> None:
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
        from ray_lowcomm.runtime.keeper import Orders
        from ray_lowcomm.runtime.ray_said import told_in_lines
        from ray_lowcomm.runtime.sending import Sent, check_sendable

        check_sendable(self.train_loop)
        if connect(self.fleet, prints=listener.shown is None):
            closing.callback(ray.shutdown)
        in_step = self.options.on_event is not None
        job = ray.get_runtime_context().get_job_id() if self._may_be_outlived() else ""
        place, shown = surrounding_place(self.fleet), listener.shown is not None
        orders = Orders(plan, spec, Sent.of(self.train_loop), place, in_step, shown, job, self._settings())
        fleet = RayFleet(orders, listener.on_event, folder.living)
        self._stop_fleet = fleet.stop
        try:
            if self._stopping:
                fleet.stop(self._stopping)
            with told_in_lines(plan.directory, listener.say):
                fleet.run()
        finally:
            self._stop_fleet = None
            listener.summary = fleet.summary or listener.last_known()

    def _folder(self, closing: ExitStack) -> RunFolder:
        """Ours, once no fleet of a job that is dead trains there any more, or that is ours, too."""

        def take_over(path: str) -> Any:
            import ray

            from ray_lowcomm.runtime.cluster import connect
            from ray_lowcomm.runtime.keeping import taken_over

            if connect(self.fleet, prints=False):
                closing.callback(ray.shutdown)
            return taken_over(path, self._settings(), bool(self.run.resume))

        return RunFolder(self.run, take_over) if self._may_be_outlived() else RunFolder(self.run)

    def _may_be_outlived(self) -> bool:
        """Whether the fleet trains on should this process die. What a recorder of the user's own writes nobody else
        could."""
        if self.fleet.transport == "local" or self.options.recorder is not None:
            return False
        from ray_lowcomm.runtime.keeping import may_be_outlived

        return may_be_outlived(self.fleet)

    def _settings(self) -> dict[str, str]:
        """What must be the same to take a living fleet over."""
        given = flatten((self.options.config or self._config()).resolved()) | dict(self.options.agreed)
        return {name: str(value) for name, value in given.items() if name not in FREE}

    def _on_local_event(self, listener: Listener, local: Any, event: Event) -> None:
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
        start = folder.start
        if self.options.recorder is not None:
            made: Recorder = self.options.recorder(folder.path, start)
            return made
        from ray_lowcomm.tracking.recorder import Recorder as FullRecorder

        return FullRecorder(self.options.config or self._config(), folder.path, start)

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

    def _info(self, folder: RunFolder) -> dict[str, Any]:
        shards = self.fleet.shards_per_replica
        info: dict[str, Any] = {"replicas": self.fleet.size} | ({"shards per replica": shards} if shards > 1 else {})
        info |= {"steps": self.steps, "transport": self.fleet.transport}
        if folder.living is not None:
            info |= {"taken over at round": folder.start + 1}
        elif folder.newest is not None:
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
            faults=self.faults,
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


__all__ = ["LowCommTrainer", "Recorder", "Result", "ShowsOutput", "TrainerOptions"]
