"""What a replica has done since the last launch, to be shared with the next."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ray_lowcomm.core.errors import ModelError
from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.engine import reported


@dataclass
class Work:
    """`loss` is a sum over `steps` in float64, `skipped` are further steps that were not taken, `beyond` all steps
    beyond the one at which the last round is applied (so negative before that).

    Seconds: `outer_s` that applying a round has taken, `blocked_s` that the inner steps have waited for one that was
    exchanged beside them. `since` is when it began by its `clock`, moved on by all that is no inner step;
    what is launched has `spent_s`.

    It is local state: with overlap a checkpoint falls between two launches.
    """

    steps: int = 0
    tokens: int = 0
    loss: Tensor | float | None = None
    since: float = 0.0
    outer_s: float = 0.0
    blocked_s: float = 0.0
    skipped: int = 0
    beyond: int = 0
    own_metrics: reported.Sums = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        self.since = self.since or self.clock()

    def add(self, loss: Tensor, tokens: int) -> None:
        """Count one inner step."""
        self.steps += 1
        self.tokens += tokens
        # float64, so that the mean does not depend on how many steps were added up before; a plain number where that
        # waits for no device
        value = loss.item() if loss.device.type == "cpu" else loss.detach().double()
        self.loss = value if self.loss is None else self.loss + value

    def restart(self) -> None:
        """Count from here on."""
        self.steps, self.tokens, self.loss, self.since = 0, 0, None, self.clock()
        self.outer_s = self.blocked_s = 0.0
        self.skipped = self.beyond = 0
        self.own_metrics = {}

    def take_out(self) -> "Work":
        """What has been done so far, which is launched; counts from here on."""
        done = Work(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        self.restart()
        return done

    def put_back(self, done: "Work", taken: int) -> None:
        """What was launched is not shared: it goes out with what has been done since, in `taken` steps."""
        self.since -= done.spent_s
        self.steps += done.steps
        self.tokens += done.tokens
        self.skipped += done.skipped
        self.loss = done.loss if self.loss is None else self.loss if done.loss is None else done.loss + self.loss
        self.beyond = done.beyond + taken
        for name, (total, count) in done.own_metrics.items():
            sums = self.own_metrics.setdefault(name, [0.0, 0])
            sums[0] += total
            sums[1] += count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done meanwhile is no inner step."""
        began = self.clock()
        yield
        if self.since <= began:  # it has not begun anew meanwhile
            self.since += self.clock() - began

    def state_dict(self) -> dict[str, Any]:
        """Plain data, exact."""
        loss = None if self.loss is None else float(self.loss)
        counts = {"steps": self.steps, "tokens": self.tokens, "skipped": self.skipped, "beyond": self.beyond}
        return counts | {"loss": loss, "own_metrics": self.own_metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.steps, self.tokens, self.loss = state["steps"], state["tokens"], state["loss"]
        self.skipped, self.beyond = state["skipped"], state["beyond"]
        self.own_metrics = {name: list(sums) for name, sums in state["own_metrics"].items()}

    def cut_anew(self, tokens: int, shard: Shard) -> None:
        """Go on with this shard's part of the `tokens` of a replica that had another number of shards."""
        self.tokens = tokens // shard.count + (shard.number < tokens % shard.count)

    @property
    def mean_loss(self) -> float | None:
        """Mean loss per step; None before the first, or if it is not finite."""
        mean = math.nan if self.loss is None else float(self.loss) / self.steps
        return mean if math.isfinite(mean) else None


def tokens_of(given: object) -> int:
    """A count of tokens as a loop gives it: a whole number, also as a 0-d tensor or of numpy.

    Raises:
        ModelError: it is something else.
    """
    value: Any = given
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, int | float) and math.isfinite(value) and value == int(value) and value >= 0:
        return int(value)
    shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ModelError(f"tokens = {shown}: must be a whole number, 0 or more")
