"""Which samples become trials: what is invalid, not worth a trial or known already is refused beforehand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ray_lowcomm.config import TrainConfig, flatten
from ray_lowcomm.core.errors import LowCommError
from ray_lowcomm.tuning.space import Sample, Space, plain
from ray_lowcomm.tuning.trial_config import overlay

MAX_DRAWS = 100  # refused in a row: then there is nothing left worth looking for


@dataclass(frozen=True)
class Refused:
    """A sample that was not tried: its settings by dotted name, and why not."""

    fields: dict[str, Any]
    reason: str


@dataclass
class Screen:
    """Judges samples of a space. `on_refused` is told of each refusal but not of repetitions, which are no news.

    `seen` has the settings of all samples accepted so far, each with the name that it was accepted under.
    """

    base: TrainConfig
    space: Space
    on_refused: Callable[[Refused], None]
    seen: dict[str, str] = field(default_factory=dict)

    def refuse(self, sample: Sample, name: str) -> str | None:
        """The reason not to try `sample`, or None: it is accepted as `name`."""
        fields: dict[str, Any] = {}
        try:
            fields = {key: plain(value) for key, value in self.space.fields(sample).items()}
            config = overlay(self.base, fields)
            reason = self.space.refuse(config)
        except LowCommError as error:
            reason = str(error)
        if reason is not None:
            self.on_refused(Refused(fields or dict(sample), reason))
            return reason
        key = _key(config)
        if key in self.seen:
            return "the same settings as an earlier trial"
        self.seen[key] = name
        return None

    def earlier(self, sample: Sample) -> str | None:
        """The name under which the same settings were accepted before."""
        try:
            return self.seen.get(_key(overlay(self.base, self.space.fields(sample))))
        except LowCommError:
            return None


def _key(config: TrainConfig) -> str:
    return str(sorted(flatten(config.resolved()).items()))
