"""A fault schedule as data, carried out inside the replica it names."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ray_lowcomm.core.settings import Fault


@dataclass
class FaultInjector:
    """Carries out the faults of one replica, each once. `die` ends the replica at once, however the host does that;
    `announce` tells the driver first, so that a restarted replica does not fall again."""

    faults: Sequence[Fault]
    member: int
    die: Callable[[], None]
    announce: Callable[[int], None]
    sleep: Callable[[float], None] = time.sleep
    fired: set[int] = field(default_factory=set)

    def at(self, phase: str, round_number: int, model: nn.Module) -> None:
        """Called when the replica is in `phase` of round `round_number` (from 1)."""
        for number, fault in enumerate(self.faults):
            here = fault.replica == self.member and fault.round == round_number and fault.phase == phase
            if here and number not in self.fired:
                self.fired.add(number)
                self.announce(number)
                self._do(fault, model)

    def _do(self, fault: Fault, model: nn.Module) -> None:
        if fault.do == "kill":
            self.die()
        elif fault.do == "hang":
            self.sleep(fault.seconds)
        else:
            parameter = next(p for p in model.parameters() if p.requires_grad and p.numel())
            with torch.no_grad():
                parameter[(0,) * parameter.dim()] = float("nan")
