"""What a sweep can be told: the fields of ``python -m jobs.tune`` beside those of a run."""

import math
import re
from dataclasses import replace
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import DataSettings, InnerSettings, RunSettings
from ray_lowcomm.engine.reported import TAKEN
from ray_lowcomm.tuning.budget import BudgetSettings
from ray_lowcomm.tuning.trial_results import MAX

Search = Literal["tpe", "nsga2", "random", "grid"]
Scheduler = Literal["asha", "pbt", "none"]
OBJECTIVES = ("val_loss", "bytes_up", "bytes_to_loss")
TimeAttr = Literal["tokens", "outer_round"]

NUM_SAMPLES = 8
TRIAL_STEPS = 320
EVAL_SAMPLES = 128  # each round is judged: with the 512 of a single run a trial of H = 4 would mostly be validated


class _Registry:
    # a plain class: pydantic warns of a field `register` in a model, since its metaclass has a method of that name
    register: str | None = Field(None, description="name in MLflow's registry under which the best model is registered")


class SweepConfig(_Registry, TrainConfig):
    """Sweep over a search space. Each trial is a run, by default of 320 inner steps where jobs.train has 800."""

    run: RunSettings = RunSettings(name="sweep_{space}", eval_every=1)
    inner: InnerSettings = InnerSettings(steps=TRIAL_STEPS)
    data: DataSettings = DataSettings(eval_samples=EVAL_SAMPLES)
    budget: BudgetSettings = BudgetSettings()

    space: str | None = Field(None, description="the search space, a module of tune_spaces (a wrong name lists all)")
    num_samples: int | None = Field(None, description=f"most trials (null: {NUM_SAMPLES}; of a grid all its points)")
    search: Search | None = Field(None, description="who draws the trials (null: tpe; random if the scheduler is pbt)")
    scheduler: Scheduler | None = Field(
        None,
        description="asha stops trials that fall behind, pbt lets them copy better ones (null: asha; none if there are "
        "two objectives, of which asha would judge by the loss alone)",
    )
    objective: str = Field(
        "val_loss",
        description="what is to be small: val_loss, bytes_up, bytes_to_loss (payload sent per replica), "
        "val_loss,bytes_up, or a metric of your own; max:NAME is to be large",
    )
    target_loss: float | None = Field(None, description="of bytes_to_loss: the validation loss to be reached")
    time_attr: TimeAttr = Field("tokens", description="trials are compared when they have had as much of it")
    grace: float | None = Field(None, description="of it before a trial is judged (null: a quarter of a run; 4 rounds)")
    reduction_factor: float = Field(2.0, description="of asha: one trial in so many goes on, for so much longer")
    max_concurrent: int | None = Field(None, description="most trials at a time (null: as many as there is room for)")
    time_budget: float | None = Field(None, description="seconds after which the sweep is stopped (null: no limit)")
    resume: bool | Literal["auto"] = Field(
        False, description="finish an interrupted sweep of this run.name, as it was begun (auto: if there is one)"
    )

    @field_validator("num_samples", "max_concurrent")
    @classmethod
    def _at_least_one(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value < 1:
            raise SettingError(str(info.field_name), value, "must be 1 or more")
        return value

    @field_validator("target_loss", "grace", "time_budget")
    @classmethod
    def _positive(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is not None and not 0 < value < math.inf:
            raise SettingError(str(info.field_name), value, "must be greater than 0")
        return value

    @field_validator("reduction_factor")
    @classmethod
    def _above_one(cls, value: float) -> float:
        if not 1.01 <= value < math.inf:
            raise SettingError("reduction_factor", value, "must be at least 1.01")
        return value

    @field_validator("grace")
    @classmethod
    def _within_reason(cls, value: float | None) -> float | None:
        if value is not None and value > 1e15:
            raise SettingError("grace", value, "must be 1e15 or less")
        return value

    @field_validator("objective")
    @classmethod
    def _known(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",")]
        for name in names:
            own = name.removeprefix(MAX)
            taken = own in TAKEN and own not in OBJECTIVES
            if not own or ":" in own or taken or (own in OBJECTIVES and own != name):
                allowed = f"must be {', '.join(OBJECTIVES)}, val_loss,bytes_up, or NAME or max:NAME of your own metrics"
                raise SettingError("objective", value, allowed)
        if len(names) > 2 or len(set(names)) < len(names) or ("bytes_to_loss" in names and len(names) > 1):
            raise SettingError("objective", value, "must be one name, or two of which neither is bytes_to_loss")
        return ",".join(names)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.objective == "bytes_to_loss") != (self.target_loss is not None):
            raise SettingError("target_loss", self.target_loss, "goes together with --objective bytes_to_loss")
        if {"val_loss", "bytes_to_loss"} & set(self.objectives) and self.run.eval_every == 0:
            raise SettingError("run.eval_every", 0, f"the objective {self.objective} needs validations: 1 or more")
        if self.scheduler == "pbt" and self.search not in (None, "random"):
            allowed = "pbt changes settings in the middle of a trial, which no searcher learns from: must be random"
            raise SettingError("search", self.search, allowed)
        if self.scheduler == "pbt" and self.max_concurrent is not None:
            allowed = "pbt compares trials that are alive together, which take turns where room is scarce: must be null"
            raise SettingError("max_concurrent", self.max_concurrent, allowed)
        if self.scheduler == "pbt" and self.objective == "bytes_up":
            allowed = "pbt changes outer_lr and residual_decay, which no byte depends on: use asha or none"
            raise SettingError("scheduler", self.scheduler, allowed)
        if self.register and not self.tracking.enabled:
            raise SettingError("register", self.register, "needs MLflow: tracking.enabled must be true")
        if self.register is not None and (not self.register.strip() or set("/:") & set(self.register)):
            raise SettingError("register", self.register, "must be a name without '/' and ':', as MLflow wants it")
        if self.run.resume:
            raise SettingError("run.resume", True, "a sweep is resumed with --resume")
        return self

    @property
    def drawn_by(self) -> Search:
        """The search, with its default filled in."""
        return self.search or ("random" if self.scheduler == "pbt" else "tpe")

    @property
    def stopped_by(self) -> Scheduler:
        """The scheduler, with its default filled in."""
        return self.scheduler or ("none" if "," in self.objective else "asha")

    @property
    def objectives(self) -> tuple[str, ...]:
        """The names, the first the one that decides."""
        return tuple(self.objective.split(","))

    @property
    def own_objectives(self) -> tuple[str, ...]:
        """Those that are metrics of the user's own."""
        return tuple(name for name in self.objectives if name not in OBJECTIVES)

    @property
    def judged_by(self) -> str:
        """The metric by which the scheduler compares trials: one that every trial has while it runs."""
        first = self.objectives[0]
        return first if self.objective == "bytes_up" or first in self.own_objectives else "val_loss"


# What may be different when a sweep is resumed: nothing that its trials depend on.
MAY_CHANGE = ("resume", "time_budget", "register", "run.log_every", "fleet.address", "tracking.")


def named(config: SweepConfig) -> SweepConfig:
    """The same with the space in place of ``{space}`` in ``run.name``."""
    space = re.sub(r"[^\w.-]+", "_", config.space or "")
    run = replace(config.run, name=config.run.name.replace("{space}", space))
    return config.model_copy(update={"run": run})


def base_of(config: SweepConfig) -> TrainConfig:
    """The configuration of the trials, before a sample is laid over it."""
    return TrainConfig.model_validate({name: getattr(config, name) for name in TrainConfig.model_fields})
