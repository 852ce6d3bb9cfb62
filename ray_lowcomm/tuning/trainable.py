"""A whole fleet as one trial of Ray Tune: driver, cohorts and replicas live in the trial's own placement group."""

import math
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from ray import tune
from ray.tune.result import DONE, RESULT_DUPLICATE

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import FleetError, LowCommError, ModelError
from ray_lowcomm.engine.member import TrainLoop
from ray_lowcomm.tuning.space import Space
from ray_lowcomm.tuning.trial_checkpoint import (
    Standing,
    adopt,
    copy_newest,
    read_standing,
    start_over,
    write_standing,
)
from ray_lowcomm.tuning.trial_config import trial_config
from ray_lowcomm.tuning.trial_room import TrialResources, check_trial_fits, check_trial_has_room
from ray_lowcomm.tuning.trial_run import TrialRun

PREDECESSOR_S = 180.0  # more than a process takes to end its fleet


class LowCommTrainable(tune.Trainable):
    """A run of a fleet as a trial; `trainable` makes what `tune.Tuner` takes.

    `step` gives one result per committed round, in order and each once, with ``outer_round step tokens loss val_loss
    bytes_up bytes_down members`` and at last ``done``. While Tune looks at a result the fleet trains on, but does not
    close the next round. A trial that cannot be run fails in its first step, with its reason in one line.
    """

    def setup(  # type: ignore[override]  # `tune.with_parameters` gives the rest
        self,
        config: dict[str, Any],
        base: TrainConfig,
        space: Space | None = None,
        directory: str = ".",
        train_loop: TrainLoop | None = None,
        objectives: tuple[str, ...] = (),
    ) -> None:
        """Find out what to run; the fleet starts with the first `step`, since `load_checkpoint` comes between."""
        # Tune has gone into a folder of its own; paths in a configuration are meant from where a replica starts
        os.chdir(os.environ.get("TUNE_ORIG_WORKING_DIR", "."))
        self._train_loop, self._objectives = train_loop, objectives
        self._standing = Standing()
        self._run: TrialRun | None = None
        self._problem: LowCommError | None = None
        self._lock: FileLock | None = None
        try:
            self._settings = trial_config(base, space, config, directory, self.trial_id)
            check_trial_has_room(self._settings)
            self._own_folder(directory)
        except LowCommError as error:
            self._problem = error  # an error in here would reach Tune as a dead actor and a stack

    def step(self) -> dict[str, Any]:
        """Wait for the next committed round.

        Raises:
            LowCommError: the run has failed, or could not begin.
        """
        if self._problem is not None:
            raise self._problem
        if self._run is None:
            run = self._settings.run
            if not self._standing.round and "://" in run.output_dir:
                start_over(f"{run.output_dir}/{run.name}")
            self._run = TrialRun(self._settings, self._train_loop, self._standing)
        result = self._run.next()
        if not result:
            return {RESULT_DUPLICATE: True, DONE: True}
        missing = [name for name in self._objectives if name not in result]
        if missing and result["outer_round"] >= 2 * max(1, self._settings.run.eval_every):
            known = ", ".join(result.get("own_metrics", {})) or "none"
            raise ModelError(f"objective {missing[0]!r}: the run gives no such metric; its own are {known}")
        # Tune ends a trial whose result lacks what it is judged by
        return dict.fromkeys(self._objectives, math.nan) | result

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the run's newest whole checkpoint (see ``checkpoint.every``); before the first one, to begin again."""
        if self._run is not None:
            self._run.save(checkpoint_dir)
            return
        if self._standing.round:
            copy_newest(f"{self._settings.run.output_dir}/{self._settings.run.name}", checkpoint_dir)
        write_standing(checkpoint_dir, self._standing)

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Go on from a checkpoint of this trial or, under population based training, of another one."""
        if self._problem is not None:
            return
        try:
            self._standing = read_standing(checkpoint)
            if self._standing.round:
                run = self._settings.run
                adopt(checkpoint, f"{run.output_dir}/{run.name}", self._standing)
        except LowCommError as error:
            self._problem = error

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial (``reuse_actors``); False: the fleet of the one before does not end."""
        if not self._end():
            return False
        self.setup(new_config)  # type: ignore[call-arg]  # see there
        return True

    def cleanup(self) -> None:
        """End the whole fleet, in order if it lets us, within a bounded time."""
        self._end()

    def _end(self) -> bool:
        ended = self._run is None or self._run.stop("the trial was stopped")
        if self._lock is not None and ended:
            self._lock.release()
        return ended

    def _own_folder(self, directory: str) -> None:
        """Wait until an earlier process of this trial, which Tune does not wait for, is through with it."""
        if "://" in directory:
            return
        path = Path(directory, "trials", f".{self.trial_id}.trial.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(path)
            self._lock.acquire(timeout=PREDECESSOR_S)
        except Timeout:
            raise FleetError(
                f"{path} is still held by an earlier process of this trial after {PREDECESSOR_S:g} s"
            ) from None
        except OSError as error:
            raise FleetError(f"the trial's folder in {directory} cannot be made: {error.strerror or error}") from error


def trainable(
    base: TrainConfig,
    space: Space | None = None,
    directory: str | None = None,
    train_loop: TrainLoop | None = None,
    objectives: tuple[str, ...] = (),
) -> type[tune.Trainable]:
    """What `tune.Tuner` takes as its trainable, with the resources that each trial's configuration asks for::

        tune.Tuner(trainable(base, space), param_space=space.domains(base), tune_config=…, run_config=…)

    Without a space the keys of ``param_space`` are dotted names of `TrainConfig`. `directory` is the sweep's folder, by
    default ``<run.output_dir>/<run.name>`` of `base`; a trial's run folder in it is ``trials/<trial_id>``. `train_loop`
    is a train function of your own, as for `LowCommTrainer`. `objectives` are metrics of your own by which trials are
    judged: NaN until there is a first value.

    A trial's state is saved when Tune asks for it (`tune.CheckpointConfig`, population based training) and is then that
    of the newest whole checkpoint of the run: let ``checkpoint.every`` divide the rounds between two of Tune's. Do not
    set ``reuse_actors`` in population based training: Ray 2.60 may then write over a checkpoint that another trial is
    to go on from.
    """
    base_directory = directory or f"{base.run.output_dir.rstrip('/')}/{base.run.name}"
    if "://" not in base_directory:
        base_directory = str(Path(base_directory).expanduser().absolute())  # a trial's process may be anywhere
    given = {"base": base, "space": space, "directory": base_directory, "train_loop": train_loop} | {
        "objectives": objectives
    }
    return tune.with_resources(tune.with_parameters(LowCommTrainable, **given), TrialResources(base, space))


__all__ = ["LowCommTrainable", "check_trial_fits", "trainable"]
