"""Does once more, in one process and without an engine, what the tapes of a run say: the same to the last bit.

From the tapes comes what each process did in which order, from the run's records who took part in each round with how
many steps. All values are computed here: batches, steps, messages, what they become, and what a joiner is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ray_lowcomm import strategies
from ray_lowcomm.core import randomness
from ray_lowcomm.core.payload import Proposal, Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.core.settings import StrategySettings
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.state import ReplicaState

from .bench import combined
from .fleet import adamw, mean_square, regression
from .models import plain
from .tape import TOKENS, Line, everything, trained

Record = Mapping[str, Any]
State = dict[str, Tensor]


@dataclass
class Process:
    """One process of a replica. `at` is the line that comes next, `steps` are inner steps that no message has, `round`
    the one whose end it stands at (None: not known before its first)."""

    member: int
    lines: Sequence[Line]
    state: ReplicaState
    at: int = 0
    steps: int = 0
    launched: int = 0
    round: int | None = None
    open: dict[str, tuple[SyncOp, Proposal]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.at == len(self.lines)

    @property
    def name(self) -> str:
        line = {k: v for k, v in self.lines[self.at].items() if k != "digest"}
        return f"replica {self.member}, line {self.at + 1}: {line}"


@dataclass
class Message:
    """What a replica has sent for an op, and the inner steps that it has in it."""

    proposal: Proposal
    steps: int


class Replay:
    """All processes of a run; `run` is to be called once."""

    def __init__(
        self,
        settings: StrategySettings,
        tapes: Sequence[tuple[int, list[Line]]],
        records: Sequence[Record],
        seed: int = 0,
    ) -> None:
        self.settings, self.records, self._seed = strategies.resolve(settings), records, seed
        self._records = {record["step"]: record for record in records}
        self._messages: dict[str, dict[int, Message]] = {}  # by op and replica
        self._received: dict[str, Received] = {}  # by op
        self._kept: dict[tuple[int, int], tuple[State, State]] = {}  # by round and replica, for joiners
        self.processes = [self._process(member, lines) for member, lines in tapes]
        torch.set_num_threads(1)

    def run(self) -> None:
        """Go through all tapes, each as far as it waits for nobody's message."""
        while any(not one.over for one in self.processes):
            went = [self._go_on(one) for one in self.processes]
            waiting = [one.name for one in self.processes if not one.over]
            assert any(went), f"nobody sends what is waited for: {waiting}"

    def digests(self) -> dict[str, str]:
        """Of the shared state at the end, by replica, as in summary.json."""
        return {str(one.member): one.state.strategy.digest() for one in self.processes}

    def did(self, what: str) -> int:
        """How many lines say that something was done so."""
        return sum(line["do"] == what for one in self.processes for line in one.lines)

    def _process(self, member: int, lines: Sequence[Line]) -> Process:
        model = plain()
        tracks = Tracks(model, adamw(model))
        strategy = strategies.build(self.settings, tracks, randomness.replica_seed(self._seed, member))
        one = Process(member, lines, ReplicaState(model, tracks, strategy, BufferSync(model, "average")))
        if not lines or lines[0]["do"] != "begin":
            one.round = 0
        return one

    def _go_on(self, one: Process) -> bool:
        begun = one.at
        while not one.over:
            line = one.lines[one.at]
            if not getattr(self, f"_{line['do']}")(one, line):
                break
            found = self._found(one, line)
            assert found == line.get("digest", found), f"{one.name}: it led to something else"
            one.at += 1
        return one.at > begun

    def _found(self, one: Process, line: Line) -> str:
        state = one.state
        whole = line["do"] in ("apply", "follow")
        return everything(state.strategy, state.tracks) if whole else trained(state.tracks)

    # ---- lines; False: it must wait ---------------------------------------------------------------------------------

    def _step(self, one: Process, line: Line) -> bool:
        state = one.state
        mean_square(state.model, regression(one.member, line["batch"])).backward()
        state.tracks.optimizers.step()
        state.tracks.optimizers.zero_grad()
        one.steps += 1
        return True

    def _propose(self, one: Process, line: Line) -> bool:
        op = SyncOp(**line["op"])
        proposal = one.state.strategy.propose(op)
        assert proposal.id == line["id"], one.name
        if not one.open:
            one.launched, one.steps = one.steps, 0
        one.open[proposal.id] = op, proposal
        assert proposal.sent is not None
        self._messages.setdefault(op.id, {})[one.member] = Message(proposal, one.launched)
        return True

    def _discard(self, one: Process, line: Line) -> bool:
        op, _ = one.open.pop(line["id"])
        one.state.strategy.discard(line["id"])
        del self._messages[op.id][one.member]
        if not one.open:
            one.steps += one.launched
        return True

    def _apply(self, one: Process, line: Line) -> bool:
        op, _ = one.open[line["id"]]
        received = self._outcome(one, op, line)
        if received is None:
            return False
        one.state.strategy.check(line["id"], received)
        one.state.strategy.apply(line["id"], received)
        del one.open[line["id"]]
        if not received.included and not one.open:
            one.steps += one.launched
        self._stands(one, op)
        return True

    def _follow(self, one: Process, line: Line) -> bool:
        op = SyncOp(**line["op"])
        received = self._outcome(one, op, line)
        if received is None:
            return False
        one.state.strategy.follow(op, received)
        self._stands(one, op)
        return True

    def _begin(self, one: Process, line: Line) -> bool:
        """What it had open was given up, and what it had not shared."""
        if line["keep"]:
            one.state.begin_again()
        else:
            wanted = [(line["round"], member) for member in {*line["sources"], line["own"]} - {None}]
            if not all(key in self._kept for key in wanted):
                return False
            alike = self._kept[line["round"], line["sources"][0]][0]
            own = {} if line["own"] is None else self._kept[line["round"], line["own"]][1]
            one.state.load_as_joiner({**alike, **own})
        one.steps, one.round = 0, line["round"]
        return True

    def _outcome(self, one: Process, op: SyncOp, line: Line) -> Received | None:
        """What a round's op became, by the record of that round; None: a message is still to be made."""
        record = self._records[op.launch]
        members, steps = tuple(record["members"]), record["steps"]
        assert tuple(line["members"]) == members, one.name
        messages = self._messages.get(op.id, {})
        if not all(member in messages for member in members):
            return None
        assert [messages[member].steps for member in members] == steps, f"{one.name}: {record}"
        if op.id not in self._received:
            tokens = [float(TOKENS * count) for count in steps]
            weights = tuple(work / sum(tokens) for work in tokens)
            self._received[op.id] = combined([messages[i].proposal.payload for i in members], members, weights)
        whole = self._received[op.id]
        # what weighs nothing is not counted
        included = line["do"] == "apply" and whole.weights[members.index(one.member)] > 0
        assert included == line["included"], one.name
        # to apply may write over it
        return replace(whole, parts=tuple(part.clone() for part in whole.parts), included=included)

    def _stands(self, one: Process, op: SyncOp) -> None:
        """One op of a round was taken over; rounds come one after another."""
        number = self._records[op.launch]["round"]
        assert one.round in (number - 1, number), f"{one.name}: round {number} after {one.round}"
        one.round = number
        alike, own = one.state.for_joiner(moments=True)
        self._kept[number, one.member] = _copied(alike), _copied(own)


def _copied(state: Mapping[str, Tensor]) -> State:
    return {name: value.clone() for name, value in state.items()}
