"""A fault schedule as data, carried out inside the replica it names."""

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ray_lowcomm.core.fault import Fault
from ray_lowcomm.core.sharding import local
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.run_spec import Host


@dataclass
class FaultInjector:
    """Carries out the faults of one replica's process, each once. The driver is told first, so that a restarted
    replica does not fall again."""

    faults: Sequence[Fault]
    host: Host
    model: nn.Module
    fired: set[int] = field(default_factory=set)
    _slow: list[tuple[int, Fault]] = field(default_factory=list)  # (until the same phase of which round, why)
    _since: float | None = None  # when the inner step began that the loop is in

    def at(self, phase: str, round_number: int) -> None:
        """Called when the replica is in `phase` of round `round_number` (from 1).

        Raises:
            OSError: it writes, and the schedule says that the disk is full.
        """
        over = [one for one in self._slow if one[1].phase == phase and round_number >= one[0]]
        self._slow = [one for one in self._slow if one not in over]
        for number, fault in enumerate(self.faults):
            in_round = round_number >= fault.round if phase == "serving" else round_number == fault.round
            mine = fault.replica == self.host.member and fault.shard == self.host.inside.shard
            here = mine and in_round and fault.phase == phase
            if here and number not in self.fired:
                self.fired.add(number)
                what = f"{fault.what} ({phase}, round {round_number})"
                self.host.channel.request(m.Fired(self.host.member, number, what, fault.do == "leave"))
                self._do(fault, round_number)

    def stepped(self) -> None:
        """An inner step begins, or what comes before it has ended."""
        self._since = self.host.clock()

    def stepping(self) -> None:
        """The loop has done its part of an inner step: one that is slow takes longer."""
        if self._slow and self._since is not None:
            factor = max(fault.factor for _, fault in self._slow)
            self.host.sleep((self.host.clock() - self._since) * (factor - 1))

    def _do(self, fault: Fault, round_number: int) -> None:
        if fault.do == "kill":
            self.host.die() if fault.whom == "replica" else self.host.kill(fault.whom)
        elif fault.do == "hang":
            self.host.sleep(fault.seconds)
        elif fault.do == "cut":
            self.host.cut(fault.seconds)
        elif fault.do == "slow":
            self._slow.append((round_number + fault.rounds, fault))
        elif fault.do == "corrupt":
            self.host.corrupt(fault.bits)
        elif fault.do == "full_disk":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (the fault schedule says so)")
        elif fault.do == "nan":
            held = (local(p) for p in self.model.parameters() if p.requires_grad)
            values = next(tensor for tensor in held if tensor.numel())
            values[(0,) * values.dim()] = float("nan")


def middle(planned: int, left: int) -> bool:
    """Whether `left` inner steps of `planned` are left in the middle of them."""
    return planned > 0 and left == (planned + 1) // 2
