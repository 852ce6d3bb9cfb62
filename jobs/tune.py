"""Sweep over a search space with Ray Tune: every trial is a whole fleet.

    python -m jobs.tune --space NAME [--num-samples N] [--SECTION.FIELD VALUE …]

All fields of jobs.train are the base of the trials. ``--help SECTION`` lists them, ``--help options`` the sweep's;
a space that does not exist lists those that do. Results go to ``<run.output_dir>/<run.name>/``: ``trials.parquet``,
``best.yaml`` (for ``jobs.train --config``), ``report.html``, and a run folder for each trial.
"""

from collections.abc import Collection, Sequence

import tune_spaces
from jobs._main import leave, run_main
from jobs._paths import settled
from ray_lowcomm.config import load_config
from ray_lowcomm.config_screen import Command
from ray_lowcomm.config_sources import all_names
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.effects import value_of
from ray_lowcomm.preflight import preflight
from ray_lowcomm.tuning.settings import SweepConfig, named
from ray_lowcomm.tuning.sweep_folder import saved_config, was_begun

COMMAND = Command(
    "python -m jobs.tune",
    (
        ("python -m jobs.tune --space topk_diloco --num-samples 8", ""),
        ("python -m jobs.tune --space budget --budget.step_s 0.8", "what a link carries"),
        ("python -m jobs.tune --space topk_diloco --resume", "finish it"),
    ),
)


def main(argv: Sequence[str]) -> None:
    """Run the sweep with these arguments."""
    config = load_sweep(argv)
    space = tune_spaces.load(config.space or "", config.budget)
    for name in sorted(config.given):
        if name.startswith("budget.") and not tune_spaces.takes_budget(config.space or ""):
            raise SettingError(
                name, value_of(config, name), f"has no effect with space = {config.space!r}: leave it out"
            )
    preflight(config, _drawn(config))
    from ray_lowcomm.tuning.sweep import run_sweep  # Ray takes seconds to import, and a mistake needs none of it

    run_sweep(config, space)


def _drawn(config: SweepConfig) -> Collection[str]:
    from ray_lowcomm.tuning.drawn import drawn_names  # Ray Tune takes seconds to import

    try:
        return drawn_names(config, tune_spaces.load(config.space or "", config.budget))
    except SettingError:  # that there is no such space is said later
        return all_names(SweepConfig)


def load_sweep(argv: Sequence[str]) -> SweepConfig:
    """The sweep's configuration; a resumed one is told again what it was told when it was begun."""

    def told(given: Sequence[str]) -> SweepConfig:
        return _decided(settled(named(load_config(given, SweepConfig, command=COMMAND, drawn=_drawn))))

    config = told(argv)
    saved = saved_config(config.run) if config.resume else None
    return config if saved is None else told(["--config", str(saved), *argv])


def _decided(config: SweepConfig) -> SweepConfig:
    """`--resume auto` is yes where there is a sweep of that name."""
    return config.model_copy(update={"resume": was_begun(config.run) if config.resume == "auto" else config.resume})


if __name__ == "__main__":
    leave(run_main(main))
