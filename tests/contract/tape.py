"""What each process of a replica has done, in order: lines in a file of its own, so that it may die at any time.

A line says what was done and when, and of what it led to a digest alone: `replay` must find that by itself.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ray_lowcomm import strategies
from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.payload import Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.member import Context
from ray_lowcomm.engine.replica import Replica
from ray_lowcomm.engine.transport import Pending
from ray_lowcomm.strategies import Strategy

from .fleet import adamw, mean_square, regression
from .models import plain

TOKENS = 8  # of a step
Line = dict[str, Any]

_build = strategies.build
_HERE = threading.local()


def trained(tracks: Tracks) -> str:
    """Digest of what inner steps change: parameters and the optimizer's state."""
    found: list[Tensor] = []
    for parameter in tracks.parameters.values():
        state = tracks.optimizers.state_of(parameter)
        found += [parameter.detach(), *(state[name] for name in sorted(state) if isinstance(state[name], Tensor))]
    return digest_tensors(found)


def everything(strategy: Strategy, tracks: Tracks) -> str:
    """Digest of all of a replica with nothing open."""
    parts = (strategy.shared_state(), strategy.local_state())
    state = digest_tensors(part[name] for part in parts for name in sorted(part))
    return f"{trained(tracks)}/{state}"


class Tape:
    """Writes lines; `step` is the nominal step that names the batch in hand."""

    def __init__(self, folder: str, member: int) -> None:
        name = f"tape_{member}_{time.time_ns()}_{os.getpid()}"
        self._file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.step = 0

    def note(self, do: str, **more: Any) -> None:
        os.write(self._file, (json.dumps({"do": do, **more}) + "\n").encode())


@dataclass(frozen=True)
class TapedStrategy:
    """What is asked of a strategy is noted."""

    strategy: Strategy
    tracks: Tracks
    tape: Tape

    def put_in_place(self) -> Strategy:
        """The strategy itself, whose methods are those of this one from here on."""
        for name in ("propose", "discard", "apply", "follow"):
            setattr(self.strategy, name, partial(getattr(self, name), getattr(self.strategy, name)))
        return self.strategy

    def propose(self, original: Callable[[SyncOp], Proposal], op: SyncOp) -> Proposal:
        proposal = original(op)
        self.tape.note("propose", op=asdict(op), id=proposal.id, digest=trained(self.tracks))
        return proposal

    def discard(self, original: Callable[[str], None], proposal: str) -> None:
        original(proposal)
        self.tape.note("discard", id=proposal, digest=trained(self.tracks))

    def apply(self, original: Callable[[str, Received], None], proposal: str, received: Received) -> None:
        original(proposal, received)
        self._note("apply", received, id=proposal)

    def follow(self, original: Callable[[SyncOp, Received], None], op: SyncOp, received: Received) -> None:
        original(op, received)
        self._note("follow", received, op=asdict(op))

    def _note(self, do: str, received: Received, **more: Any) -> None:
        digest = everything(self.strategy, self.tracks)
        self.tape.note(do, members=received.members, included=received.included, digest=digest, **more)


@dataclass(frozen=True)
class TapedChannel:
    """A line to the driver that notes what state a replica is given."""

    channel: Any
    tape: Tape

    def request(self, request: m.Request) -> m.Answer:
        answer: m.Answer = self.channel.request(request)
        if isinstance(answer, m.Welcome) and (answer.state is not None or answer.keep):
            offered = answer.state
            own = None if offered is None or offered.own is None else offered.own[0]
            sources = sorted(offered.sources) if offered is not None else []
            self.tape.note("begin", round=answer.round, keep=answer.keep, sources=sources, own=own)
        return answer

    def send(self, request: m.Request) -> Pending[m.Answer]:
        pending: Pending[m.Answer] = self.channel.send(request)
        return pending

    def stop_asked(self) -> bool:
        return bool(self.channel.stop_asked())


def taped_build(settings: StrategySettings, tracks: Tracks, seed: int = 0) -> Strategy:
    """In the place of `strategies.build`, in the threads of `Taping`."""
    return TapedStrategy(_build(settings, tracks, seed), tracks, _HERE.tape).put_in_place()


@dataclass(frozen=True)
class Taping:
    """A train function with its tape in `folder`; `between` is called between steps with the replica and how many
    there should be. Whoever runs it puts `taped_build` in place (`with_tapes`, where the process is its own)."""

    folder: str
    between: Callable[[Context, Replica], None]
    own_process: bool = False

    def __call__(self, context: Context) -> None:
        if self.own_process:
            strategies.build = taped_build
        tape = _HERE.tape = Tape(self.folder, context.index)
        context.host = replace(context.host, channel=TapedChannel(context.host.channel, tape))
        model = plain()
        optimizer = adamw(model)
        replica = context.wrap(model, optimizer)
        tracks = replica._state.tracks
        handle = optimizer.register_step_post_hook(
            lambda *_: tape.note("step", batch=tape.step, digest=trained(tracks)),
        )
        while not replica.finished:
            tape.step = replica.step_number
            loss = mean_square(model, regression(context.index, tape.step))
            loss.backward()
            replica.step(loss, TOKENS)
            self.between(context, replica)
        handle.remove()


def pids(folder: str, member: int) -> list[int]:
    """Of all processes that a replica has had, in the order of their starts."""
    found = sorted(Path(folder).glob(f"tape_{member}_*"), key=lambda path: int(path.name.split("_")[2]))
    return [int(path.name.split("_")[3]) for path in found]


def tapes(folder: str) -> list[tuple[int, list[Line]]]:
    """(replica, lines) of all processes that there were, in the order of their starts."""
    found = sorted(Path(folder).glob("tape_*"), key=lambda path: int(path.name.split("_")[2]))
    return [(int(path.name.split("_")[1]), [*map(json.loads, path.read_text().splitlines())]) for path in found]
