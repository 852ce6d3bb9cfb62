"""A sweep from start to end: draw, run trials with Ray Tune, keep and show what comes of it."""

import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import tune
from ray.tune import CheckpointConfig, ResumeConfig
from ray.tune.schedulers import TrialScheduler

from ray_lowcomm.config import TrainConfig, to_yaml
from ray_lowcomm.core.errors import FleetError, LowCommError, SettingError
from ray_lowcomm.engine.storage import Storage
from ray_lowcomm.runtime.cluster import connect
from ray_lowcomm.runtime.owned_folder import folder_path
from ray_lowcomm.runtime.stopping import EXIT_STOPPED, write_into_the_void
from ray_lowcomm.tuning.book import Book
from ray_lowcomm.tuning.draws import random_samples
from ray_lowcomm.tuning.ending import End
from ray_lowcomm.tuning.interrupt import interrupts
from ray_lowcomm.tuning.objective import Values
from ray_lowcomm.tuning.results import Results
from ray_lowcomm.tuning.schedulers import scheduler
from ray_lowcomm.tuning.screen import Refused, Screen
from ray_lowcomm.tuning.search import Drawing, drawing, most_trials
from ray_lowcomm.tuning.settings import SweepConfig, base_of
from ray_lowcomm.tuning.show import Show
from ray_lowcomm.tuning.space import Space, guarded
from ray_lowcomm.tuning.sweep_folder import SweepFolder, check_resumable, check_unchanged
from ray_lowcomm.tuning.trainable import check_trial_fits, trainable
from ray_lowcomm.tuning.trial_config import overlay
from ray_lowcomm.tuning.tune_state import TUNE_FOLDER, StateCopies, has_state
from ray_lowcomm.tuning.watch import Watch

# Tune takes these only as environment variables of the process that runs it. Its own loggers write every result twice
# more; its state is to be on disk soon after a trial has ended; a metric may be missing (bytes to a loss not reached).
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "2",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a box of its own even when told to be silent
}


@dataclass(frozen=True)
class Plan:
    """All that is settled before anything is started or written."""

    config: SweepConfig
    space: Space
    base: TrainConfig
    domains: Mapping[str, Any]
    drawing: Drawing
    scheduler: TrialScheduler
    refused: list[Refused]


def run_sweep(config: SweepConfig, space: Space) -> None:
    """Run the sweep that `config` describes, or finish an interrupted one.

    Raises:
        SettingError: a setting that is not allowed, or that this space does not go with.
        FleetError: no trial finished, or none could be started.
        KeyboardInterrupt: it was asked to stop; what it has is written, and it can be resumed.
    """
    show, space = Show(config.objective, config.inner.steps), guarded(space)
    if config.resume:
        check_resumable(Storage(folder_path(config.run)))
    plan = _plan(config, space, show)
    connected = connect(plan.base.fleet, prints=True)
    try:
        check_trial_fits(plan.base)
        with SweepFolder(config.run, bool(config.resume)) as folder:
            if folder.said:
                show.say(folder.said)
            if config.resume:
                check_unchanged(config, folder.path)
            try:
                _run(plan, folder.path, show)
            except KeyboardInterrupt:
                show.say(f"interrupted; {_go_on(config)}")
                raise
    except OSError as error:
        raise FleetError(f"{folder_path(config.run)} cannot be written: {error}") from error
    finally:
        if connected:
            ray.shutdown()


def _go_on(config: SweepConfig) -> str:
    again = ["--run.name", config.run.name, "--run.output_dir", config.run.output_dir, "--resume"]
    return f"go on with: python -m jobs.tune {shlex.join(again)}"


def headline(config: SweepConfig, space: Space, most: int) -> str:
    """What is going to happen, in one line."""
    fleet = config.fleet
    judged = "" if config.stopped_by == "none" else f", {config.stopped_by} on {config.time_attr}"
    each = " ".join(f"{amount:g} {name}" for name, amount in fleet.resources_per_replica.items())
    what = f"sweep {config.run.name} over {space.name} in {folder_path(config.run)}"
    size = f"at most {most} trials of {config.inner.steps} steps (--inner.steps)"
    trial = (
        f"each with {fleet.max_replicas} replicas {'in one process ' if fleet.transport == 'local' else ''}of {each}"
    )
    return f"{what}: {size}, {trial}; {config.drawn_by}{judged}, objective {config.objective}"


def _plan(config: SweepConfig, space: Space, show: Show) -> Plan:
    base = base_of(config)
    domains = space.domains(base)
    refused: list[Refused] = []

    def on_refused(one: Refused) -> None:
        refused.append(one)
        show.refused(one)

    _check_space(base, space, domains, config.run.seed)
    judge = scheduler(config, domains)
    wanted = most_trials(config, domains)
    show.expect(wanted, domains)
    show.say(headline(config, space, wanted))
    draw = drawing(config, domains, Screen(base, space, on_refused), show.say, bool(config.resume))
    show.expect(draw.num_samples, domains)
    return Plan(config, space, base, domains, draw, judge, refused)


def _check_space(base: TrainConfig, space: Space, domains: Mapping[str, Any], seed: int) -> None:
    """What a space cannot do without (a step time for a budget) is said before anything starts."""
    try:
        sample = next(random_samples(domains, seed))
    except Exception as error:  # Tune's domains look at their limits when they are drawn from
        reason = f"cannot be drawn from: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise SettingError("space", space.name, reason) from error
    try:
        space.refuse(overlay(base, space.fields(sample)))
    except SettingError:
        raise  # something that the space needs of its base
    except LowCommError:
        return  # this one sample is refused, and the next may not be


def _run(plan: Plan, directory: str, show: Show) -> None:
    values = Values(tuple(plan.config.objective.split(",")), plan.config.target_loss)
    results = Results(directory)
    book = Book(plan.base, plan.space, values, results.rounds)
    if not plan.config.resume:
        results.config(to_yaml(plan.config))
    end = End(plan.config, book, results, show, plan.refused)
    watch = Watch(book, plan.config.stopped_by, end.listeners, StateCopies(directory).keep)

    end.begin()
    show.start()
    try:
        with interrupts(partial(_leave_without_ray, plan.config, watch, show, end)) as stopping, quiet():
            watch.watch_for(stopping, end.interrupted)
            _tune(plan, directory, watch)
            was_stopped = stopping()
    except KeyboardInterrupt:
        watch.stop_now()
        was_stopped = True
    except BaseException:
        end.cut("FAILED")
        raise
    finally:
        show.stop()
    budget = plan.config.time_budget
    cut = watch.close("an interruption" if was_stopped else f"the time budget of {budget:g} s" if budget else "Tune")
    if cut and budget and not was_stopped:
        show.say(f"the time budget of {budget:g} s is used up; {_go_on(plan.config)}")
    end.finish(was_stopped)


def _leave_without_ray(config: SweepConfig, watch: Watch, show: Show, end: End) -> None:
    """The end of a sweep that is stopped while Ray holds the main thread: in another thread, and of the process."""
    try:
        write_into_the_void()
        watch.stop_now()
        show.stop()
        with suppress(KeyboardInterrupt):
            end.finish(was_stopped=True)
        show.say(f"interrupted, and Ray does not answer any more; {_go_on(config)}")
    except Exception as error:
        show.say(f"interrupted, and its end cannot be written: {type(error).__name__}: {error}")
    finally:
        sys.stdout.flush()
        os._exit(EXIT_STOPPED)


def _tune(plan: Plan, directory: str, watch: Watch) -> None:
    config = plan.config
    # population based training copies checkpoints of others, which must not be gone by then
    keep = 6 if config.scheduler == "pbt" else 2
    resume = config.resume and has_state(directory)
    if resume:
        watch.expect_state()
    with tune_environment():
        tune.run(
            trainable(plan.base, plan.space, directory, objectives=plan.config.own_objectives),
            name=TUNE_FOLDER,
            storage_path=directory,
            config=dict(plan.domains),
            num_samples=plan.drawing.num_samples,
            search_alg=plan.drawing.algorithm,
            scheduler=plan.scheduler,
            max_concurrent_trials=plan.drawing.max_concurrent,
            time_budget_s=config.time_budget,
            checkpoint_config=CheckpointConfig(checkpoint_frequency=config.checkpoint.every, num_to_keep=keep),
            callbacks=[watch],
            trial_dirname_creator=lambda trial: trial.trial_id,
            resume_config=ResumeConfig() if resume else None,
            raise_on_failed_trial=False,
            verbose=0,
        )


@contextmanager
def tune_environment() -> Iterator[None]:
    """Context in which Tune's own settings are set where the user has not."""
    ours = {name: value for name, value in TUNE_ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which Tune says nothing: what a user has to know is said by us."""
    loggers = [logging.getLogger(name) for name in ("ray.tune", "ray.train", "ray.air")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
