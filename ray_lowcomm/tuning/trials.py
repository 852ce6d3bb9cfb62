"""What is known of a sweep's trials: the rows of ``trials.parquet`` and what the report draws."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Scalar = str | int | float | bool
Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Point:
    """A committed round. Bytes are payload bytes of one replica since the start of the trial; losses in nats.

    `val_loss` is None in rounds without an evaluation.
    """

    round: int
    step: int
    loss: float | None
    val_loss: float | None
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class Trial:
    """One trial. `number` counts from 1 in the order of drawing and is its label in tables and figures.

    `status`: ran to its end, was stopped by the scheduler (or the time budget), or failed for `reason`. `params` are
    the settings that the sweep varied, by their dotted names; `metrics` the last value of each number (`val_loss loss
    bytes_up bytes_down rounds step tokens wall_s`), absent where there is none.
    """

    number: int
    trial_id: str
    status: Status
    reason: str = ""
    params: Mapping[str, Scalar] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: tuple[Point, ...] = ()
