"""A replica: what a train loop holds. One `step` per optimizer step; everything else happens inside it."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from ray_lowcomm import strategies
from ray_lowcomm.core import randomness
from ray_lowcomm.core.errors import FleetError, ModelError, PayloadError
from ray_lowcomm.core.schedule import Schedule, SyncOp
from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.core.tracks import Tracks
from ray_lowcomm.core.weights import copy_into
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine import reported
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.catching_up import Behind
from ray_lowcomm.engine.duties import Duties, Save
from ray_lowcomm.engine.entry import Entry, Standing
from ray_lowcomm.engine.faults import FaultInjector, middle
from ray_lowcomm.engine.inner_step import InnerStep
from ray_lowcomm.engine.loop_parts import LoopParts, check_gradients
from ray_lowcomm.engine.reception import Reception
from ray_lowcomm.engine.round import Held, Outcome, Parties, Round, Seat
from ray_lowcomm.engine.run_spec import Host, RunSpec
from ray_lowcomm.engine.skipping import Samples, Skipping
from ray_lowcomm.engine.state import ReplicaState
from ray_lowcomm.engine.step_check import StepCheck
from ray_lowcomm.engine.together import Together
from ray_lowcomm.engine.watch import Watch
from ray_lowcomm.engine.work import Work, tokens_of

WORK, SCALER = "replica.work", "replica.scaler"  # names in the local state


class Replica:
    """One replica of the model in the fleet."""

    def __init__(self, spec: RunSpec, host: Host, parts: LoopParts) -> None:
        self._spec, self._host, self._parts = spec, host, parts
        inside = host.inside
        tracks = Tracks(parts.model, parts.optimizer, Shard(inside.shard, inside.shards))
        self._watch = Watch(parts.model, tracks)
        seed = randomness.replica_seed(spec.run.seed, host.member, shard=inside.shard)
        strategy = strategies.build(spec.strategy, tracks, seed)
        buffers = BufferSync(parts.model, cast(Any, spec.buffers), exchanges=inside.shard == 0)
        self._skipping = Skipping(tracks, buffers)
        self._work, self._stand = Work(clock=host.timer), Standing()
        local = {**parts.local_stateful, WORK: self._work} | ({} if parts.scaler is None else {SCALER: parts.scaler})
        self._state = ReplicaState(parts.model, tracks, strategy, buffers, dict(parts.stateful), local)
        averaged = strategies.algorithm(spec.strategy.name).averages_moments
        self._state.together = together = Together(inside, tracks, buffers, averaged)
        self._inner = InnerStep(tracks, self._watch, parts.clip_norm, parts.schedule, parts.scaler, together)
        self._check = StepCheck(self._inner, self._skipping, together, self._work, spec.skip_nonfinite, self._say)
        self._faults = FaultInjector(spec.faults, host, parts.model)
        self._parties = Parties(strategy, buffers, host.channel, host.transport, self._faults, inside)
        self._duties = Duties(self._state, self._work, self._parties, spec, host.member)
        moments, reset = strategies.moments_of(tracks), spec.state_on_sync == "reset"
        self._schedule: Schedule = strategies.schedule(spec.strategy, moments, spec.run.seed, spec.steps)
        self._reception = Reception(self._parties, self._skipping, self._state.optimizer, host.member, reset, together)
        self._entry = Entry(spec, host, parts, self._state, self._duties, self._reception, self._faults, self._work)
        self._flight: Round | None = None  # launched, and not applied
        self._due: tuple[m.Commit, dict[int, int]] | None = None  # what is to be done, and where the data stand
        self._launch_due = False  # the next round is launched where the last one is applied
        self._to_save: m.Stop | None = None
        self._stands: dict[int, int] = {}  # data positions after the last inner step
        self._trained = False
        self._began_anew = False  # inside of the step that the loop is in
        self._leaves = False  # so that it does not join again
        self._enter("")
        self._state.forget()
        self._round_begins = True  # for the loop, with its next turn

    # ---- what a train loop uses ----------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """The nominal step; it jumps at a launch if the replica was told to take fewer."""
        return self._stand.step

    @property
    def rounds(self) -> int:
        """Committed rounds that have been applied here."""
        return self._stand.round

    @property
    def members(self) -> tuple[int, ...]:
        """Who took part in the last of them."""
        return self._stand.members

    @property
    def stopped(self) -> str | None:
        """Why this replica's part in the run has ended before the run's end; None if it has not."""
        return self._stand.stopped

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, or the run was stopped.

        What is due after a round (a checkpoint, an evaluation, a state for a joiner) is done here, or in the next
        `step` if that comes first: by then a loop has stepped its scheduler, and updated its average of the weights.
        """
        self.settle()
        if not self._over and self._stop_asked():
            self._pause()
        return self._over

    def _stop_asked(self) -> bool:
        plain = self._state.together.plain  # else shards would hear of it at different steps
        return self._host.channel.stop_asked() if plain else self._check.turn.stop

    def step(self, loss: Tensor, tokens: int | Tensor = 0, samples: Samples = None) -> None:
        """After backward(): clip, optimizer step, zero_grad, and the synchronisation that is due.

        `loss` is the mean loss of the batch, 0-d; `tokens`, a whole number, is what weighs this replica's work in every
        mean over replicas (where all give 0, steps do). If loss or gradients are not finite the optimizer step is
        skipped and counted; `samples` names the batch to the user then (or is called to do so).
        May put the model and optimizer back to the fleet's state, when this replica was given up in between.

        Raises:
            ModelError: `loss` is not a scalar, `tokens` not a whole number, or the loop trains beside this replica.
            FleetError: the run has ended or cannot go on.
        """
        self.settle()
        if self._over:
            raise FleetError("step() after the run has finished: loop with `while not replica.finished`")
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ModelError(f"the loss must be a 0-d tensor (the mean over the batch), got {what}")
        tokens = tokens_of(tokens)
        self._check_loop()
        over = self._flight.over if self._flight is not None else lambda: False
        problem, loss, norm = self._check.judge(loss, over, self._host.channel.stop_asked)
        if problem:
            self._check.skip(self.step_number + 1, problem, samples)
        else:
            self._skipping.taken()
            self._work.add(loss, tokens)
        if not self._take(bool(problem), norm):
            self._began_anew = self.stopped is None
            return
        if not self._trained:
            self._state.optimizer.check()
            self._trained = True
        self._watch.mark()
        self._faults.stepped()
        self._stands = self._positions()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Numbers of your own by name, at any time: means over this round and over the replicas and shards with them.

        They are in ``rounds.jsonl``, in MLflow, and a sweep can be after them. Nothing is sent and nobody waits. Report
        before `step`: what is given after a round's last step counts for the next round, after the run's for none.

        Raises:
            ModelError: naming what is no number, or a name that is taken.
        """
        reported.add(self._work.own_metrics, reported.checked(metrics, "replica.report"))

    def settle(self) -> None:
        """Do what waits for the end of a loop's turn; see `finished`."""
        if self._began_anew:
            self._began_anew = False
            self._state.load_again()
        if self._round_begins:
            self._round_begins = False
            self._state.keep_start()
        if self._to_save is not None:
            stop, self._to_save = self._to_save, None
            self._save_between(stop)
        self._duties.settle()
        while self._due is not None or self._launch_due:  # the last launch has duties of its own at once
            if self._due is not None:
                (commit, positions), self._due = self._due, None
                with self._work.paused():
                    self._duties.do(commit, positions, self._parts)
            else:
                self._launch_due = False
                self._launch(self._stand.target, self._stands)
            self._watch.mark()
            self._faults.stepped()
        if self._over:
            self._watch.close()

    @property
    def _over(self) -> bool:
        return self._stand.stopped is not None or (self._stand.left == 0 and not self._launch_due)

    def _pause(self) -> None:
        """The run is being stopped: save what has been done since the last round, and leave."""
        while self._flight is not None:  # it is exchanged to its end, or given up: either way nothing is left open
            self._land()
            self._watch.mark()
            self.settle()
        if self._over:
            return
        answer = self._host.channel.request(m.Paused(self._host.member, self._stand.incarnation, self.rounds))
        if isinstance(answer, m.Stop):
            self._stand.stopped = answer.reason
            self._save_between(answer)
            self._watch.close()

    def _save_between(self, stop: m.Stop) -> None:
        if stop.checkpoint is not None:
            self._duties.save(Save(self.rounds, stop.checkpoint, stop.write_shared, True, between=True), self._stands)

    def load_weights(self, state: Mapping[str, Tensor]) -> bool:
        """Start from these weights and buffers, a state_dict of the model: all replicas alike, before the first step.

        In a run that goes on, and in a replica that joins, nothing is loaded: what they have is newer. Returns whether
        it was.

        Raises:
            ModelError: it does not fit the model, or it is too late; nothing was changed.
        """
        if self._trained:
            raise ModelError("load_weights is for before the first step: later the fleet goes on from what it shares")
        if self.step_number > 0:
            return False
        for text in copy_into(self._parts.model, state, "the state given to load_weights"):
            self._say(text)
        self._state.share_parameters()
        self._watch.mark()
        return True

    def _say(self, text: str) -> None:
        self._host.channel.request(m.Said(self._host.member, text))

    def _check_loop(self) -> None:
        if said := self._watch.check(self.step_number):
            self._say(said)
        if not self._trained:
            averaged = self._ops(self._stand.target)[0].point == "after_backward"
            check_gradients(self._state.tracks.parameters, self._parts.clip_norm is not None, averaged)

    @property
    def digest(self) -> str | None:
        """Digest of the shared state; None where replicas are not kept consistent, or if this one missed the end."""
        known = self._parties.strategy.consistent and self._stand.incarnation > 0 and self.stopped is None
        return self._parties.strategy.digest() if known else None

    def leave(self) -> m.Finished:
        """The train function has returned, early or not: what was launched comes to its end, what is due is done."""
        self._leaves = True
        self.settle()
        while self._flight is not None:
            self._land()
            self.settle()
        self._duties.finish()
        return m.Finished(self._host.member, self.digest, self.step_number, self._work.steps, self._work.skipped)

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _take(self, skipped: bool, norm: Tensor | None) -> bool:
        """One inner step, and with it the rounds that are launched or applied; False: this replica has begun anew, or
        must stop. `norm` is that of its own gradients, if it is known."""
        stand, before = self._stand, self._stand.step
        launches = stand.left == 1 and self._flight is None
        if self._spec.faults:
            self._faults.stepping()
            self._fault_between()
        at = stand.target if launches else before + 1
        averaged = launches and self._ops(at)[0].point == "after_backward"
        if averaged:
            if not self._launch(at, self._positions()):
                return False
            stand.left += 1  # this one
        if averaged or not skipped:  # what all replicas step with must be stepped by all
            self._inner.take(before, None if averaged else norm)
        stand.step = at
        stand.left -= 1
        stand.taken += 1
        self._work.beyond += not averaged  # which belongs to the round that is applied
        return averaged or self._reach()

    def _fault_between(self) -> None:
        """A fault in the middle of the inner steps of a round; those that are taken beside the exchange of the round
        before count where there are no others."""
        stand, flight, steps, number = self._stand, self._flight, self._stand.planned, self.rounds + 1
        if flight is not None:
            beside_all = self._schedule.next_step(flight.launched_at) == flight.due_at
            steps, number = (flight.apply_at - flight.launched_at if beside_all else 0), number + 1
        if middle(steps, stand.left):
            self._faults.at("inner", number)

    def _reach(self) -> bool:
        """What is applied or launched at the step that has been reached; False as `_take`."""
        stand, flight = self._stand, self._flight
        if flight is not None:
            with self._work.paused():
                over = flight.over if self._state.together.plain else lambda: self._check.turn.over
                goes_on = stand.step < flight.apply_at and not over()
            return goes_on or self._land()
        return stand.left > 0 or self._launch(stand.target, self._positions())

    def _ops(self, step: int) -> tuple[SyncOp, ...]:
        """The strategy's ops at `step`, and with them those of the buffers."""
        ops = self._schedule.ops(step, self._stand.overlap)
        return ops + self._state.buffers.ops(step, ops[0].apply, ops[0].point)

    def _launch(self, step: int, positions: dict[int, int]) -> bool:
        """Begin the round that is launched at `step`, at these data positions, and end it, too, if it is applied there;
        False as `_take`."""
        self._watch.check_layout()
        stand, ops = self._stand, self._ops(step)
        # those that were taken beyond the launch before the run was stopped
        stand.taken = max(0, self._work.beyond - stand.planned)
        self._flight = Round(self._parties, Seat(self._host.member, stand.incarnation, self.rounds, stand.history))
        self._flight.launch(ops, self._work, positions, stand.beside, self._skipping.hopeless)
        stand.step, stand.left = step + stand.taken, self._flight.apply_at - step - stand.taken
        self._work.beyond = -stand.left
        self._faults.at("launched", self.rounds + 1)
        return stand.left > 0 or self._land()

    def _land(self) -> bool:
        """End the round that was launched: wait for it and apply it; False as `_take`."""
        flight, began = self._flight, self._work.clock()
        assert flight is not None, "a round is launched before it is applied"
        with self._work.paused():
            outcome = flight.finish()
            if flight.apply_at > flight.launched_at:
                self._work.blocked_s += self._work.clock() - began
            if isinstance(outcome, Held):
                self._faults.at("ready", self.rounds + 1)
            self._flight = None
            return self._conclude(flight, outcome)

    def _conclude(self, flight: Round, outcome: Outcome) -> bool:
        """Apply what was received, follow what was missed, or begin anew or stop; False as `_take`."""
        if isinstance(outcome, Held):
            self._apply(outcome, flight)
            # after what is due: the next round takes the work with it that a checkpoint needs, and waits for joiners
            self._launch_due = outcome.commit.inner_steps > 0 and self._stand.left == 0
            return True
        if isinstance(outcome, Behind):
            return self._catch_up(flight, outcome)
        self._give_up(flight, outcome)
        return False

    def _catch_up(self, flight: Round, behind: Behind) -> bool:
        """Follow the rounds that went on without this replica; what it has not shared goes out with its next message.
        False as `_take`."""
        if not behind.counted:
            self._work.put_back(flight.work, self._stand.taken)
        try:
            self._reception.catch_up(flight, behind)
        except PayloadError as error:
            self._enter(f"what it had missed cannot be read: {error}", shared=False)
            return False
        self._entry.come_back(self._stand, behind)
        self._work.beyond = 0
        self._launch_due = self._stand.left == 0
        return True

    def _apply(self, held: Held, flight: Round) -> None:
        """Apply what was received, and go on as the commit says."""
        began, stand, commit = self._work.clock(), self._stand, held.commit
        if commit.dealt and self._entry.deal(commit.dealt) and self._parts.data is not None:
            self._parts.data.load(commit.positions)
        self._reception.take_over(held)
        stand.go_on(held, flight, self._schedule.next_step(flight.launched_at))
        self._due, self._round_begins = (commit, self._positions()), True
        self._work.outer_s += self._work.clock() - began

    def _give_up(self, flight: Round, outcome: m.Reset | m.Stop) -> None:
        """A round that this replica has no part in any more."""
        if isinstance(outcome, m.Reset):
            self._work.put_back(flight.work, self._stand.taken)
            self._inner.drop()
            if not self._leaves:
                self._enter(outcome.reason, outcome.shared)
            return
        self._stand.stopped = outcome.reason
        if flight.point == "after_backward":  # the loop has not stepped its scheduler for what is given up here
            self._work.restart()
            self._save_between(outcome)
        else:
            self._work.put_back(flight.work, self._stand.taken)
            self._to_save, self._stands = outcome, self._positions()

    def _positions(self) -> dict[int, int]:
        return dict(self._parts.data.positions) if self._parts.data is not None else {}

    def _enter(self, reason: str, shared: bool = True) -> None:
        """Join the fleet and take over its state; the work done since the last commit is given up and counted."""
        holds = self._entry.holds(self._stand) if shared and self._flight is None else None
        self._flight, self._due, self._launch_due = None, None, False
        welcome = self._entry.enter(self._stand, reason, holds)
        if welcome is None:
            return
        if welcome.serve:
            self._duties.serve(welcome.round, welcome.serve_own)
        if welcome.evaluate:
            self._duties.evaluate(welcome.round, self._parts.evaluate)
        self._watch.mark()
        self._stands = self._positions()
        self._work.since = self._work.clock()
        if welcome.launch is not None and self._stand.left == 0:
            self._launch(self._stand.target, self._stands)
