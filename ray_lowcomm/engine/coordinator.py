"""The driver's decisions as a state machine without clock, network or threads: requests in, answers and events out.

Whoever hosts it (an actor, a test, the local transport) calls `handle` for each request, `lost` when a member dies,
`tick` now and then, and delivers what has gathered in `outbox` and `events`. Time is passed in, in seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ray_lowcomm import strategies
from ray_lowcomm.core.schedule import Schedule
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import (
    EXPECTED,
    LIVE,
    Exchange,
    Member,
    MemberState,
    listed,
    minority,
    paced,
    weights_of,
)
from ray_lowcomm.engine.totals import Totals, round_record

NOTICE_S = 30.0  # a wait says who is missing this often
VOTE_MARGIN_S = 10.0  # votes may come this long after the exchange's own deadline
PARAMETER_TRACKS = ("params", "grads")  # what `dense_bytes` counts


@dataclass(frozen=True)
class RunPlan:
    """What the coordinator needs to know of a run. `total` are nominal inner steps; `restore` a checkpoint to start
    from, `restored` its manifest."""

    run: RunSettings
    checkpoint: CheckpointSettings
    strategy: StrategySettings
    fleet: FleetSettings
    total: int
    directory: str
    restore: str | None = None
    restored: dict[str, Any] | None = None


@dataclass(frozen=True)
class Event:
    """For the host: kind `record` (a round), `notice` (text), `manifest` (write it: the checkpoint is whole),
    `failed` (text, traceback) or `ended`."""

    kind: str
    data: Any = None


class Coordinator:
    """Membership, rounds, generations, votes and duties of one run."""

    def __init__(self, plan: RunPlan, now: float) -> None:
        self.plan, self.now = plan, now
        self.outbox: list[tuple[int, m.Answer]] = []
        self.events: list[Event] = []
        self.members: dict[int, Member] = {}
        self.ended = False
        self.failure: str | None = None
        self.round = self.step = self.generation = 0
        self.positions: dict[int, int] = {}
        self.totals = Totals()
        self.digests: dict[int, str | None] = {}
        self.fired: set[int] = set()
        self._restore = plan.restore
        self._history = ""
        self._checkpoints: dict[int, dict[int, m.Saved]] = {}
        self._expected_files: dict[int, tuple[int, ...]] = {}
        self._schedule: Schedule | None = None
        self._agreed: dict[str, str] | None = None
        self._started = False
        self._begun = self._quiet = now
        self._first_arrival: float | None = None
        self._quorum_since: float | None = None
        self._said = now
        self._exchange: Exchange | None = None
        self._group: tuple[int, ...] = ()  # members of the generation whose collective group is known to work
        self._retries = 0
        self._moved: dict[int, m.Bytes] = {}
        self._failures: dict[int, int] = {}
        self._speeds: dict[int, float] = {}
        self._record: tuple[int, dict[str, Any]] | None = None  # (evaluator, record) that waits for its val_loss
        self._finishing = False
        if plan.restored:
            self._take_manifest(plan.restored)

    # ---- requests -------------------------------------------------------------------------------------------------

    def handle(self, request: m.Request, now: float) -> None:
        """Take a request of a member; answers, for it and others, appear in `outbox`."""
        self.now = now
        handlers: dict[type, Callable[[Any], None]] = {
            m.Join: self._join,
            m.Arrival: self._arrive,
            m.Vote: self._vote,
            m.Offer: self._offer,
            m.Evaluated: self._evaluated,
            m.Saved: self._saved,
            m.Fired: self._fired,
            m.Finished: self._finished,
            m.Failed: self._failed,
        }
        handlers[type(request)](request)

    def exchange_is_on(self, generation: int) -> bool:
        """Whether members of this generation should go on waiting for each other."""
        return self._exchange is not None and self._exchange.generation == generation and not self._exchange.broken

    def lost(self, index: int, incarnation: int, why: str, now: float) -> None:
        """A member has died or hangs; ignored unless this incarnation is the current one."""
        self.now = now
        member = self.members.get(index)
        if member is None or member.incarnation != incarnation or member.state not in (*LIVE, MemberState.JOINING):
            return
        self._count_lost(member, why)
        self._after_loss(member)

    def tick(self, now: float) -> None:
        """Deadlines: who does not arrive, vote or join in time is given up, and waits say who is missing."""
        self.now = now
        if self.ended or self.failure:
            return
        if not self._started:
            self._tick_start()
        elif self._exchange is not None:
            self._tick_exchange(self._exchange)
        else:
            self._tick_arrivals()

    def stop(self, reason: str) -> None:
        """End the run early and in order: no further rounds; everyone is told at its next request."""
        if not self.ended and not self.failure:
            self._finishing = True
            self._notice(f"stopping: {reason}")
            self._release((MemberState.JOINING, MemberState.ARRIVED), reason)
            self._end_if_all_out()

    def summary(self) -> dict[str, Any]:
        """Fields of summary.json that the coordinator knows."""
        digests = {str(i): d for i, d in sorted(self.digests.items())}
        counts = {"rounds": self.round, "replicas": self.plan.fleet.replicas, "state_digests": digests}
        return counts | replace(self.totals, wall_s=self.totals.wall_s + self.now - self._begun).summary()

    # ---- joining --------------------------------------------------------------------------------------------------

    def _join(self, join: m.Join) -> None:
        old = self.members.get(join.member)
        if old is not None and old.state in LIVE:
            self._count_lost(old, "was started again")
        self.totals.lost_inner_steps += join.steps_lost
        incarnation = old.incarnation + 1 if old else 1
        member = Member(join.member, incarnation, join.digest, join.endpoint)
        self.members[join.member] = member
        if old is not None:
            self._after_loss(old)
        if self.ended or self.failure or self._finishing:
            member.state = MemberState.OUT
            self._answer(join.member, m.Stop(self.failure or "the run has ended"))
            return
        if not self._agree(join):
            return
        if not self._started:
            waiting = self._in(MemberState.JOINING)
            if len(waiting) == self.plan.fleet.replicas:
                self._begin(waiting)
        elif not any(x.state in LIVE for x in self.members.values()):
            self._begin_again()

    def _agree(self, join: m.Join) -> bool:
        mine = join.config | {"optimizer.moments": ",".join(join.moments)}
        if self._agreed is None:
            self._agreed = mine
            plan = self.plan
            self._schedule = strategies.schedule(plan.strategy, join.moments, plan.run.seed, plan.total)
        differing = {k: (v, self._agreed.get(k)) for k, v in mine.items() if v != self._agreed.get(k)}
        if differing:
            text = "; ".join(f"{k} is {v!r} here and {other!r} elsewhere" for k, (v, other) in differing.items())
            self._fail(f"replica {join.member} was started with other settings than the rest: {text}")
        return not differing

    def _begin(self, members: list[Member]) -> None:
        """All are there: train from the checkpoint, or from the lowest member's initial weights."""
        self._started = True
        first = min(members, key=lambda member: member.index)
        others = [x for x in members if x.digest != first.digest and self._restore is None]
        for member in members:
            if member in others:
                member.state, member.donor = MemberState.FETCHING, first.index
                continue
            serve = tuple(x.index for x in others) if member is first else ()
            evaluate = member is first and self.round == 0 and self.plan.run.eval_every > 0
            self._welcome(member, serve=serve, evaluate=evaluate)

    def _begin_again(self) -> None:
        """Nobody holds the shared state any more: the members that have come go back to the last whole checkpoint."""
        waiting = [x for x in self.members.values() if x.state is MemberState.JOINING]
        if len(waiting) < self.plan.fleet.replicas:
            return
        lost = self.round
        if self.plan.restored:
            self._take_manifest(self.plan.restored)
        else:
            self.round = self.step = 0
            self.positions, self._history = {}, ""
        self._notice(f"all replicas were lost: back from round {lost} to round {self.round}")
        self._begin(waiting)

    def _welcome(self, member: Member, state: Any = None, serve: tuple[int, ...] = (), evaluate: bool = False) -> None:
        member.state, member.arrival, member.vote, member.donor = MemberState.TRAINING, None, None, None
        member.planned = self._steps_to_next()
        self._answer(
            member.index,
            m.Welcome(
                incarnation=member.incarnation,
                round=self.round,
                step=self.step,
                inner_steps=member.planned,
                positions=dict(self.positions),
                state=state,
                restore=self._restore if state is None else None,
                serve=serve,
                evaluate=evaluate,
                history=self._history,
                fired=tuple(sorted(self.fired)),
            ),
        )

    def _offer(self, offer: m.Offer) -> None:
        self._answer(offer.member, m.Noted())
        for index in offer.joiners:
            member = self.members[index]
            if member.state is MemberState.FETCHING and member.donor == offer.member and offer.round == self.round:
                self.totals.state_transfer_bytes += offer.nbytes
                self._welcome(member, state=offer.state)

    # ---- a round --------------------------------------------------------------------------------------------------

    def _arrive(self, arrival: m.Arrival) -> None:
        member = self.members.get(arrival.member)
        if member is None or member.incarnation != arrival.incarnation or member.state is not MemberState.TRAINING:
            self._answer(arrival.member, m.Reset("this replica was given up by the fleet"))
            return
        if self._finishing:
            self._leave(member, "the run is being stopped")
            return
        if not arrival.healthy:
            self._sit_out(member, arrival)
            return
        member.arrival, member.state = arrival, MemberState.ARRIVED
        if self._first_arrival is None:
            self._first_arrival = self._said = self.now
        self._close_if_complete()

    def _sit_out(self, member: Member, arrival: m.Arrival) -> None:
        self.totals.nonfinite_rejected += 1
        self._notice(f"round {arrival.round + 1}: replica {member.index} sits out: {arrival.problem}")
        member.state = MemberState.OUT
        if not any(x.state in LIVE for x in self.members.values()):
            self._fail(
                f"round {arrival.round + 1}: no replica is left with finite values (replica {member.index}: "
                f"{arrival.problem}): lower inner.lr, set inner.clip_norm, or look at the data"
            )
            return
        self._answer(member.index, m.Reset(arrival.problem))
        self._close_if_complete()

    def _close_if_complete(self) -> None:
        arrived = self._in(MemberState.ARRIVED)
        if arrived and self._exchange is None and not self._in(*EXPECTED):
            self._close([x.index for x in arrived])

    def _close(self, arrived: list[int]) -> None:
        digests = {i: d for i in arrived if (a := self.members[i].arrival) and (d := a.digest) is not None}
        wrong = minority(digests) if digests else ()
        if wrong is None:
            self._fail(
                f"before round {self.round + 1} replicas hold different shared state: {digests}; nothing is saved"
            )
            return
        for index in wrong:
            self._notice(f"replica {index} holds other shared state than the majority: it is reset")
            self.members[index].state = MemberState.OUT
            self._answer(index, m.Reset("its shared state differed from the majority's"))
        self._first_arrival = self._quorum_since = None
        self._send_plan([i for i in arrived if i not in wrong])

    def _send_plan(self, indices: list[int]) -> None:
        members = tuple(sorted(indices))
        arrivals = [self._arrival(i) for i in members]
        ops = [[(s.op, s.combine) for s in a.sizes] for a in arrivals]
        if any(o != ops[0] for o in ops):
            self._fail(f"round {self.round + 1}: replicas came with different messages: {dict(zip(members, ops))}")
            return
        if members != self._group:
            self.generation += 1
        self._exchange = Exchange(self.generation, members, weights_of(arrivals), self.now)
        sizes = {op: tuple(a.sizes[k].nbytes for a in arrivals) for k, (op, _) in enumerate(ops[0])}
        plan = m.Plan(
            generation=self.generation,
            round=self.round,
            members=members,
            weights=self._exchange.weights,
            sizes=sizes,
            deadline_s=self.plan.fleet.deadline_s,
            rendezvous=self.members[members[0]].endpoint,
        )
        for index in members:
            self.members[index].state, self.members[index].vote = MemberState.EXCHANGING, None
            self._answer(index, plan)

    def _vote(self, vote: m.Vote) -> None:
        member, exchange = self.members.get(vote.member), self._exchange
        stale = member is None or member.incarnation != vote.incarnation or member.state is not MemberState.EXCHANGING
        if stale or exchange is None or exchange.generation != vote.generation:
            self._answer(vote.member, m.Reset("its exchange is over"))
            return
        assert member is not None
        member.vote = vote
        self.totals.count_bytes(vote.member, vote.bytes)
        moved = self._moved.setdefault(vote.member, {})
        for kind, amount in vote.bytes.items():
            moved[kind] = moved.get(kind, 0) + amount
        if not vote.ok:
            exchange.broken = True
        self._tally(exchange)

    def _tally(self, exchange: Exchange) -> None:
        alive = [self.members[i] for i in exchange.members if self.members[i].state is MemberState.EXCHANGING]
        votes = [x.vote for x in alive if x.vote is not None]
        if len(votes) < len(alive):
            return
        if not alive:
            self._exchange, self._group = None, ()
            self._retries = 0
        elif all(v.ok for v in votes) and len({v.digest for v in votes}) == 1:
            self._commit(exchange, alive, votes)
        else:
            self._retry(alive, votes)

    def _retry(self, alive: list[Member], votes: list[m.Vote]) -> None:
        self._exchange, self._group = None, ()
        self._retries += 1
        self.totals.rounds_retried += 1
        problems = (
            "; ".join(f"replica {v.member}: {v.problem}" for v in votes if not v.ok)
            or "digests of what was received differ"
        )
        self._notice(
            f"round {self.round + 1}: exchange failed ({problems}); attempt {self._retries + 1} of the same messages"
        )
        if self._retries > self.plan.fleet.max_retries:
            self._fail(f"round {self.round + 1} failed {self._retries} times (fleet.max_retries): {problems}")
            return
        self._send_plan([x.index for x in alive])

    def _commit(self, exchange: Exchange, alive: list[Member], votes: list[m.Vote]) -> None:
        self._flush_record(None)
        arrivals = [self._arrival(i) for i in exchange.members]
        schedule = self._schedule_now()
        step = schedule.next_step(self.step) or self.plan.total
        launched = schedule.ops(step)
        self.round += 1
        self._history = votes[0].digest
        self._group = exchange.members
        self._count(arrivals, launched)
        position = (self.round, step, exchange.generation)
        record = round_record(position, arrivals, votes, list(self._moved.values()), self._retries)
        self.totals.train_loss = record["loss"]
        for kind in ("compute_s", "exchange_s", "wait_s"):
            setattr(self.totals, kind, getattr(self.totals, kind) + record[kind])
        self.step = max((op.apply for op in launched), default=step)
        self._exchange, self._retries, self._moved = None, 0, {}
        self._give_duties(alive, record)

    def _count(self, arrivals: list[m.Arrival], launched: tuple[Any, ...]) -> None:
        for arrival in arrivals:
            self._failures[arrival.member] = 0
            self.positions.update(arrival.positions)
            self.totals.inner_steps += arrival.steps
            self.totals.tokens += arrival.tokens
            if arrival.steps:
                self._speeds[arrival.member] = arrival.compute_s / arrival.steps
        if self.plan.fleet.replicas > 1 and any(op.track in PARAMETER_TRACKS for op in launched):
            self.totals.dense_bytes += int(self._agreed_number("model.dense_bytes"))

    def _give_duties(self, alive: list[Member], record: dict[str, Any]) -> None:
        run, lowest = self.plan.run, min(x.index for x in alive)
        last = self._schedule_now().next_step(self.step) is None
        evaluate = run.eval_every > 0 and (last or self.round % run.eval_every == 0)
        every = self.plan.checkpoint.every
        folder = f"checkpoints/round_{self.round:06d}" if last or (every and self.round % every == 0) else None
        if folder:
            self._checkpoints[self.round] = {}
            self._expected_files[self.round] = tuple(x.index for x in alive)
        joiners = self._in(MemberState.JOINING)
        if last:
            self._finishing = True
            self._release((MemberState.JOINING,), "the run has ended")
        serve = () if last else tuple(x.index for x in joiners)
        pace = self._pace(alive)
        for member in alive:
            first = member.index == lowest
            member.state, member.arrival, member.vote = MemberState.TRAINING, None, None
            member.planned = pace[member.index]
            commit = m.Commit(
                round=self.round,
                inner_steps=member.planned,
                evaluate=evaluate and first,
                checkpoint=folder,
                write_shared=first,
                export="model" if last and first else None,
                serve=serve if first else (),
            )
            self._answer(member.index, commit)
        for member in joiners if serve else ():
            member.state, member.donor = MemberState.FETCHING, lowest
        self._record = (lowest, record)
        if not evaluate:
            self._flush_record(None)

    def _pace(self, alive: list[Member]) -> dict[int, int]:
        nominal = self._steps_to_next()
        if self.plan.fleet.pace == "equal" or nominal == 0:
            return dict.fromkeys((x.index for x in alive), nominal)
        return paced(nominal, {x.index: self._speeds.get(x.index, 0.0) for x in alive})

    # ---- duties done ----------------------------------------------------------------------------------------------

    def _evaluated(self, done: m.Evaluated) -> None:
        self._answer(done.member, m.Noted())
        if done.round == 0:
            self.totals.val_loss_start = done.val_loss
            self.events.append(Event("start_loss", done.val_loss))
        elif self._record is not None and self._record[0] == done.member and self._record[1]["round"] == done.round:
            self._flush_record(done.val_loss)

    def _flush_record(self, val_loss: float | None) -> None:
        if self._record is not None:
            record = self._record[1] | {"val_loss": val_loss}
            self._record = None
            if val_loss is not None:
                self.totals.val_loss = val_loss
            self.events.append(Event("record", record))

    def _saved(self, saved: m.Saved) -> None:
        self._answer(saved.member, m.Noted())
        parts = self._checkpoints.get(saved.round)
        if parts is None:
            return
        if saved.problem:
            del self._checkpoints[saved.round]
            self._notice(f"checkpoint of round {saved.round} is given up: replica {saved.member}: {saved.problem}")
            return
        parts[saved.member] = saved
        if set(parts) == set(self._expected_files[saved.round]):
            del self._checkpoints[saved.round]
            self._complete(saved.round, parts)

    def _complete(self, number: int, parts: dict[int, m.Saved]) -> None:
        if number != self.round:
            self._notice(f"checkpoint of round {number} came after round {self.round} was committed: given up")
            return
        files = {name: list(info) for part in parts.values() for name, info in part.files.items()}
        self.totals.wall_s += self.now - self._begun
        self._begun = self.now
        manifest = {
            "format": 1,
            "round": self.round,
            "step": self.step,
            "generation": self.generation,
            "replicas": self.plan.fleet.replicas,
            "members": sorted(parts),
            "strategy": self.plan.strategy.name,
            "config": self._agreed,
            "positions": {str(k): v for k, v in sorted(self.positions.items())},
            "fired": sorted(self.fired),
            "history": self._history,
            "totals": self.totals.to_json(),
            "files": files,
        }
        folder = f"checkpoints/round_{number:06d}"
        self.plan = replace(self.plan, restored=manifest, restore=f"{self.plan.directory}/{folder}")
        self._restore = self.plan.restore
        self.events.append(Event("manifest", (folder, manifest)))

    def _take_manifest(self, manifest: dict[str, Any]) -> None:
        self.round, self.step, self._history = manifest["round"], manifest["step"], manifest["history"]
        self.generation = max(self.generation, manifest["generation"])
        self.positions = {int(k): v for k, v in manifest["positions"].items()}
        self.fired |= set(manifest["fired"])
        before = self.totals
        self.totals = Totals.from_json(manifest["totals"])
        for name in ("members_lost", "rounds_retried", "nonfinite_rejected"):
            setattr(self.totals, name, max(getattr(self.totals, name), getattr(before, name)))

    def _fired(self, fired: m.Fired) -> None:
        self.fired.add(fired.fault)
        self._notice(f"fault {fired.fault} of the schedule at replica {fired.member}")
        self._answer(fired.member, m.Noted())

    def _finished(self, finished: m.Finished) -> None:
        self._answer(finished.member, m.Noted())
        self.digests[finished.member] = finished.digest
        self.members[finished.member].state = MemberState.FINISHED
        if not self._in(*LIVE, MemberState.JOINING):
            self._finishing = True  # a train function may return before its last step
        self._after_loss(self.members[finished.member])
        self._end_if_all_out()

    def _failed(self, failed: m.Failed) -> None:
        self._answer(failed.member, m.Noted())
        self._fail(f"replica {failed.member}: {failed.error}", failed.traceback)

    # ---- losses and ends ------------------------------------------------------------------------------------------

    def _count_lost(self, member: Member, why: str) -> None:
        """Give a live member up. Steps of a killed replica are unknown, so those it was told to take are counted."""
        if member.state in LIVE and not self._finishing:
            self.totals.members_lost += 1
            committed = member.state is MemberState.EXCHANGING and member.vote is not None and member.vote.ok
            if not committed:
                self.totals.lost_inner_steps += member.arrival.steps if member.arrival else member.planned
        if not self._finishing:
            self._failures[member.index] = self._failures.get(member.index, 0) + 1
            self._notice(f"round {self.round + 1}: replica {member.index} is lost ({why}) while {member.state.value}")
        member.state = MemberState.OUT
        if self._failures.get(member.index, 0) > self.plan.fleet.max_failures:
            self._fail(f"replica {member.index} died {self._failures[member.index]} times without a round: {why}")

    def _after_loss(self, member: Member) -> None:
        """What may go on now that nobody waits for this member any more."""
        for other in self.members.values():
            if other.state is MemberState.FETCHING and other.donor == member.index:
                other.state, other.donor = MemberState.JOINING, None
        if self._record is not None and self._record[0] == member.index:
            self._flush_record(None)
        if self._exchange is not None and member.index in self._exchange.members:
            self._exchange.broken = True
            self._tally(self._exchange)
        self._close_if_complete()
        if not any(x.state in LIVE for x in self.members.values()):
            self._quiet = self.now
            if self._finishing:
                self._end_if_all_out()
            elif self._started and not self.failure:
                self._begin_again()

    def _tick_start(self) -> None:
        waited, there = self.now - self._begun, sorted(self.members)
        text = f"{len(there)} of {self.plan.fleet.replicas} replicas have joined after {waited:.0f} s"
        if waited > self.plan.fleet.start_s:
            self._fail(f"{text} (fleet.start_s): does the cluster have room for the others?")
        elif self.now - self._said > NOTICE_S:
            self._notice(text)

    def _tick_exchange(self, exchange: Exchange) -> None:
        if self.now - exchange.started > self.plan.fleet.deadline_s + VOTE_MARGIN_S:
            for index in exchange.members:
                member = self.members[index]
                if member.state is MemberState.EXCHANGING and member.vote is None:
                    self.lost(index, member.incarnation, "did not vote in time", self.now)

    def _tick_arrivals(self) -> None:
        fleet, missing = self.plan.fleet, [x.index for x in self._in(*EXPECTED)]
        arrived = self._in(MemberState.ARRIVED)
        if not missing and not arrived:
            if self.now - self._quiet > fleet.start_s:
                self._fail(f"no replica has come back within {fleet.start_s:.0f} s (fleet.start_s)")
            return
        if self._first_arrival is None or not missing:
            return
        waited = self.now - self._first_arrival
        if waited > fleet.hang_s:
            for index in missing:
                self.lost(index, self.members[index].incarnation, "did not arrive within fleet.hang_s", self.now)
        elif fleet.straggler == "drop" and fleet.quorum is not None and len(arrived) >= fleet.quorum:
            if self._quorum_since is None:
                self._quorum_since = self.now
            if self.now - self._quorum_since >= fleet.grace_s:
                self._drop(missing)
        elif self.now - self._said > NOTICE_S:
            self._notice(f"round {self.round + 1}: waiting for {listed(missing)} for {waited:.0f} s")

    def _drop(self, late: list[int]) -> None:
        self._notice(f"round {self.round + 1}: goes on without {listed(late)} (quorum, fleet.grace_s)")
        for index in late:
            self.members[index].state = MemberState.OUT
        self._close_if_complete()

    def _release(self, states: tuple[MemberState, ...], reason: str) -> None:
        for member in self._in(*states):
            self._leave(member, reason)

    def _leave(self, member: Member, reason: str) -> None:
        member.state = MemberState.OUT
        self._answer(member.index, m.Stop(reason))

    def _end_if_all_out(self) -> None:
        if (
            self._finishing
            and not self.ended
            and not self.failure
            and not any(x.state in LIVE for x in self.members.values())
        ):
            self._flush_record(None)
            self.ended = True
            self.events.append(Event("ended"))

    def _fail(self, text: str, traceback: str = "") -> None:
        if self.failure or self.ended:
            return
        self.failure = text
        self._flush_record(None)
        self.events.append(Event("failed", (text, traceback)))
        for member in self.members.values():
            if member.state in (*LIVE, MemberState.JOINING):
                self._leave(member, text)

    # ---- small things ---------------------------------------------------------------------------------------------

    def _in(self, *states: MemberState) -> list[Member]:
        return [x for x in self.members.values() if x.state in states]

    def _arrival(self, index: int) -> m.Arrival:
        arrival = self.members[index].arrival
        assert arrival is not None
        return arrival

    def _answer(self, index: int, answer: m.Answer) -> None:
        self.outbox.append((index, answer))

    def _notice(self, text: str) -> None:
        self._said = self.now
        self.events.append(Event("notice", text))

    def _schedule_now(self) -> Schedule:
        assert self._schedule is not None
        return self._schedule

    def _steps_to_next(self) -> int:
        following = self._schedule_now().next_step(self.step)
        return 0 if following is None else following - self.step

    def _agreed_number(self, key: str) -> str:
        assert self._agreed is not None
        return self._agreed[key]
