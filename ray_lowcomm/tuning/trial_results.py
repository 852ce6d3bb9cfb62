"""What a trial reports of a round. Pure."""

import math
from collections.abc import Mapping
from typing import Any

Result = dict[str, Any]
MAX = "max:"  # before the name of a metric that is to be large


def result_of(record: Mapping[str, Any], totals: Mapping[str, Any]) -> Result:
    """One result for Tune from a line of rounds.jsonl and the run's sums after that round.

    `tokens` and bytes are since the start of the run, bytes a sum over its rounds, each of the replica with most;
    `members` is a count. `val_loss` is the last known one, at first that from before training. A loss that is not known
    is NaN: a number must always be there, and schedulers pass NaN over. Metrics of the user's own have their last
    value; as a sweep makes its objectives small, each has a negated one, too, named `MAX` and its name.
    """
    val_loss = totals["val_loss"] if totals["val_loss"] is not None else totals["val_loss_start"]
    return {
        "outer_round": record["round"],
        "step": record["step"],
        "tokens": totals["tokens"],
        "loss": _number(record["loss"]),
        "val_loss": _number(val_loss),
        "bytes_up": totals["bytes_up"],
        "bytes_down": totals["bytes_down"],
        "members": len(record["members"]),
        **_own(totals.get("metrics") or {}),
    }


def _own(metrics: Mapping[str, float | None]) -> Result:
    if not metrics:
        return {}
    numbers = {name: _number(value) for name, value in metrics.items()}
    return numbers | {MAX + name: -value for name, value in numbers.items()} | {"own_metrics": numbers}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
