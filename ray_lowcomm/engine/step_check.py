"""What is looked at before an inner step is taken: whether loss and gradients are finite, on all shards alike."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ray_lowcomm.engine.inner_step import InnerStep
from ray_lowcomm.engine.skipping import Samples, Skipping
from ray_lowcomm.engine.together import Together, Turn
from ray_lowcomm.engine.work import Work

CALM = Turn(0.0, 0.0, 0.0, over=False, stop=False)


@dataclass
class StepCheck:
    """One replica's, or one shard's. `skips`: a step that is not finite is not taken; `say` tells the user.

    `turn` is the last step as all shards have seen it, where there are several.
    """

    inner: InnerStep
    skipping: Skipping
    together: Together
    work: Work
    skips: bool
    say: Callable[[str], object]
    turn: Turn = field(default=CALM, init=False)

    def judge(
        self, loss: Tensor, over: Callable[[], bool], stop: Callable[[], bool]
    ) -> tuple[str, Tensor, Tensor | None]:
        """After backward(): (what is not finite, if that matters, the loss of the replica, 0-d, and the norm of its
        gradients, if it is known). Where there are several shards it is asked whether the round in flight is `over`,
        as far as this one knows, and whether replicas are asked to `stop`."""
        self.inner.unscale()
        if self.together.plain:
            norm = self.inner.norm() if self.skips else None
            return (self.skipping.problem(loss, norm) if self.skips else ""), loss, norm
        self.turn = turn = self.together.turn(loss, over(), stop())
        problem = self.skipping.problem_of(turn) if self.skips else ""
        return problem, torch.tensor(turn.loss), torch.tensor(turn.norm, dtype=torch.float64)

    def skip(self, step: int, problem: str, samples: Samples) -> None:
        """Do without step number `step`."""
        self.work.skipped += 1
        self.skipping.put_back()
        if text := self.skipping.said(step, problem, samples):
            self.say(text)
        self.inner.drop()
