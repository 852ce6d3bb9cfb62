"""How a replica comes into the fleet, and begins again: what it asks for, and what it takes over."""

import time
from dataclasses import dataclass, field, replace

from ray_lowcomm import strategies
from ray_lowcomm.core import randomness
from ray_lowcomm.core.errors import ExchangeError, FleetError, PayloadError
from ray_lowcomm.core.remarks import Remark
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.catching_up import Behind, Lines, PastRound, fetch_missed
from ray_lowcomm.engine.duties import Duties
from ray_lowcomm.engine.faults import FaultInjector
from ray_lowcomm.engine.loop_parts import Dealt, LoopParts, unsaved_scheduler
from ray_lowcomm.engine.reception import Reception
from ray_lowcomm.engine.round import Held, Round
from ray_lowcomm.engine.run_spec import Host, RunSpec, settings_to_agree
from ray_lowcomm.engine.state import ReplicaState
from ray_lowcomm.engine.watch import unheld
from ray_lowcomm.engine.work import Work


@dataclass
class Standing:
    """Where a replica stands. `step` is the nominal step, `round` counts committed rounds, `history` is the digest of
    all of them, `members` took part in the last one.

    `target` is the nominal step of the next launch, `left` the inner steps up to it; while a round goes on beside them,
    up to where that is applied. No steps left: the run is over. `planned` were there at first, `taken` are those since
    the last launch. `overlap`: how much later than launched the next round is applied; `beside` are the inner steps to
    be taken here meanwhile.
    """

    incarnation: int = 0
    step: int = 0
    round: int = 0
    history: str = ""
    members: tuple[int, ...] = ()
    target: int = 0
    left: int = 0
    planned: int = 0
    taken: int = 0
    overlap: int = 0
    beside: int = 0
    stopped: str | None = None

    def go_on(self, held: Held, flight: Round, following: int | None) -> None:
        """After a round that was in `flight` has been applied; the next launch is at step `following`."""
        commit, late = held.commit, flight.apply_at - flight.launched_at
        self.history, self.round, self.members = held.history, commit.round, held.results[0][2].members
        self.target, self.overlap, self.beside = following or self.step, commit.overlap, commit.beside
        self.planned = max(0, commit.inner_steps - late)
        # where it is applied early, as the run is being stopped, the steps up to there are still to be taken
        self.left = self.planned + flight.apply_at - self.step if commit.inner_steps else 0
        self.stopped = commit.leave or self.stopped

    def come_back(self, answer: m.Return, rounds: tuple[PastRound, ...]) -> None:
        """After the missed `rounds` have been followed."""
        self.round, self.step, self.history = answer.round, answer.step, answer.history
        self.planned = self.left = answer.inner_steps
        self.target, self.overlap, self.beside = answer.launch or answer.step, answer.overlap, answer.beside
        self.taken = 0
        if rounds:
            self.members = rounds[-1].members


@dataclass
class Entry:
    """Joins the fleet for one replica, as often as it must."""

    spec: RunSpec
    host: Host
    parts: LoopParts
    state: ReplicaState
    duties: Duties
    reception: Reception
    faults: FaultInjector
    work: Work
    settings: dict[str, str] = field(init=False)
    _fetched: dict[int, int] = field(default_factory=dict)  # bytes of the state that was loaded, by who gave them
    _fetch_s: float = 0.0

    def __post_init__(self) -> None:
        self.settings = settings_to_agree(self.spec, self.state)

    def enter(self, stand: Standing, reason: str, holds: str | None) -> m.Welcome | None:
        """Join and take over the fleet's state; what was done since the last launch is given up and counted.

        `holds` as in `Join`. Returns what the driver has said, None if the run is over.
        """
        while True:
            answer = self.host.channel.request(self._join(reason, holds))
            try:
                if isinstance(answer, m.Welcome):
                    self.work.restart()
                    self._take_over(stand, answer)
                    if answer.state is None:
                        return self._said(answer)
                    welcome, outcome = answer, self._rounds_since(stand)
                    if isinstance(outcome, Behind):
                        return self._said(self._follow(stand, welcome, outcome))
                    answer = outcome
                if isinstance(answer, m.Stop):
                    stand.left, stand.stopped = 0, answer.reason
                    return None
                if not isinstance(answer, m.Reset):
                    raise FleetError(f"the driver answered {type(answer).__name__} to a replica that joins")
                reason, holds = answer.reason, None
            except (ExchangeError, PayloadError) as error:
                reason, holds = f"the state offered could not be fetched: {error}", None

    def _said(self, welcome: m.Welcome) -> m.Welcome:
        """With what the user should know of what was loaded."""
        notes, self.state.notes = self.state.notes, []
        for text in notes:
            self.host.channel.request(m.Said(self.host.member, text))
        return welcome

    def come_back(self, stand: Standing, behind: Behind) -> None:
        """Stand where the fleet does, after what was missed has been followed."""
        stand.come_back(behind.answer, behind.rounds)
        dealt, data = behind.answer.dealt, self.parts.data
        if dealt and self.deal(dealt) and data is not None:  # the data are shared otherwise by now
            data.load(behind.answer.positions)
        if behind.rounds:
            self.host.channel.request(m.CaughtUp(self.host.member, len(behind.rounds), behind.nbytes))

    def _rounds_since(self, stand: Standing) -> Behind | m.Answer:
        """Those that were committed while the state was loaded."""
        host, back = self.host, m.Back(self.host.member, stand.incarnation, stand.round, self._fetched, self._fetch_s)
        answer = host.channel.request(back)
        lines = Lines(host.transport, host.channel, host.inside)
        return fetch_missed(lines, replace(back, fetched={}), stand.history, answer)

    def _follow(self, stand: Standing, welcome: m.Welcome, behind: Behind) -> m.Welcome:
        """Bring the state that was loaded to where the fleet is by now."""
        self.reception.follow(behind.rounds)
        self.come_back(stand, behind)
        return replace(welcome, round=behind.answer.round, launch=behind.answer.launch)

    def holds(self, stand: Standing) -> str | None:
        """Digest of the committed history whose shared state this replica holds, whole and finite; None without one."""
        return stand.history if stand.incarnation and self.state.shared_is_finite() else None

    def deal(self, dealt: tuple[int, ...]) -> bool:
        """These replicas share the data from here on; False: the data cannot be shared anew."""
        data: object = self.parts.data
        if isinstance(data, Dealt):
            data.deal(dealt)
            return True
        return False

    def _join(self, reason: str, holds: str | None) -> m.Join:
        return m.Join(
            member=self.host.member,
            digest=self.state.digest(),
            config=self.settings,
            moments=strategies.moments_of(self.state.tracks),
            remarks=self._remarks(),
            steps_lost=self.work.steps,
            skipped_lost=self.work.skipped,
            reason=reason,
            holds=holds,
        )

    def _remarks(self) -> tuple[Remark, ...]:
        left = unheld(self.state.tracks)
        of_strategy = strategies.remarks(self.state.strategy, self.spec.strategy, self.spec.steps)
        idle, alone = self.state.buffers.idle, unsaved_scheduler(self.parts)
        return of_strategy + tuple(text for text in (left, idle, alone, *self.parts.remarks) if text)

    def _take_over(self, stand: Standing, welcome: m.Welcome) -> None:
        stand.incarnation, stand.history = welcome.incarnation, welcome.history
        stand.round, stand.step = welcome.round, welcome.step
        stand.planned = stand.left = welcome.inner_steps
        stand.target, stand.overlap = welcome.launch or welcome.step, welcome.overlap
        stand.beside = welcome.beside
        self.faults.fired |= set(welcome.fired)
        member, seed = self.host.member, self.spec.run.seed
        randomness.seed_all(randomness.replica_seed(seed, member, welcome.incarnation, self.host.inside.shard))
        self.deal(welcome.dealt)  # before the state, which may be of just these shards
        if welcome.keep:
            self.reception.skipping.put_back()
            self.state.begin_again()
        elif welcome.state is not None:
            offered = welcome.state
            self.reception.together.all_well("a state", lambda: self._load(offered), ExchangeError)
        elif welcome.restore is not None:
            self.duties.restore(welcome.restore, welcome.manifest or {}, welcome.dealt)
            self._go_on_between(stand)
        self.reception.together.spread()
        self.reception.skipping.keep()
        self.reception.skipping.taken()
        if self.parts.data is not None:
            self.parts.data.load(welcome.positions)

    def _load(self, offered: m.Offered) -> None:
        """Take over a state of a live fleet.

        Raises:
            ExchangeError: it could not be fetched, or is not what the members have.
        """
        began, fetched = time.perf_counter(), []
        if offered.own is not None:  # first: should the one that has it die later on, nothing is lost
            member, reference = offered.own
            fetched.append(self.host.transport.fetch({member: reference}))
        fetched.append(self.host.transport.fetch(offered.sources))
        self._fetch_s = time.perf_counter() - began
        self.state.load_as_joiner({name: value for part in fetched for name, value in part.state.items()})
        self._fetched = {}
        for part in fetched:
            for member, nbytes in part.nbytes.items():
                self._fetched[member] = self._fetched.get(member, 0) + nbytes
        if offered.digest and self.state.strategy.digest() != offered.digest:
            raise ExchangeError("what was fetched is not the state that the members have")

    def _go_on_between(self, stand: Standing) -> None:
        """Some of the round's inner steps may have been done before the run was stopped, or more of them are left where
        its last round was applied early."""
        beyond = self.work.beyond
        stand.left = max(0, stand.planned - beyond)
        stand.step = stand.step + beyond if stand.left else stand.target
