"""A replica: what a train loop holds. One `step` per optimizer step; everything else happens inside it."""

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ray_lowcomm import strategies
from ray_lowcomm.core import randomness
from ray_lowcomm.core.errors import ExchangeError, FleetError, ModelError
from ray_lowcomm.core.schedule import Schedule, SyncOp
from ray_lowcomm.core.tracks import PARAMS, Tracks
from ray_lowcomm.core.weights import copy_into
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine import reported
from ray_lowcomm.engine.buffers import BufferSync
from ray_lowcomm.engine.duties import Duties
from ray_lowcomm.engine.faults import FaultInjector
from ray_lowcomm.engine.inner_step import InnerStep
from ray_lowcomm.engine.loop_parts import Dealt, LoopParts, check_gradients, unsaved_scheduler
from ray_lowcomm.engine.round import Held, Parties, Round, Seat, Work, tokens_of
from ray_lowcomm.engine.run_spec import Host, RunSpec, settings_to_agree
from ray_lowcomm.engine.skipping import Samples, Skipping
from ray_lowcomm.engine.state import ReplicaState
from ray_lowcomm.engine.watch import Watch, unheld

WORK, SCALER = "replica.work", "replica.scaler"  # names in the local state


class Replica:
    """One replica of the model in the fleet.

    `step_number` is the nominal step (it jumps at a commit if the replica was told to take fewer), `rounds` the number
    of committed rounds, `members` who took part in the last one, `finished` whether the run is over.
    """

    def __init__(self, spec: RunSpec, host: Host, parts: LoopParts) -> None:
        self._spec, self._host, self._parts = spec, host, parts
        tracks = Tracks(parts.model, parts.optimizer)
        self._watch = Watch(parts.model, tracks)
        self._inner = InnerStep(tracks, self._watch, parts.clip_norm, parts.schedule, parts.scaler)
        strategy = strategies.build(spec.strategy, tracks, randomness.replica_seed(spec.run.seed, host.member))
        buffers = BufferSync(parts.model, spec.buffers)  # type: ignore[arg-type]  # checked with the settings
        self._skipping = Skipping(tracks, buffers)
        self._work, self._history = Work(), ""
        scaler = {} if parts.scaler is None else {SCALER: parts.scaler}
        local = {**parts.local_stateful, WORK: self._work, **scaler}
        self._state = ReplicaState(parts.model, tracks, strategy, buffers, dict(parts.stateful), local)
        self._parties = Parties(strategy, buffers, host.channel, host.transport)
        self._duties = Duties(self._state, host.channel, host.transport, spec.directory, host.member)
        moments = strategies.moments_of(tracks)
        self._schedule: Schedule = strategies.schedule(spec.strategy, moments, spec.run.seed, spec.steps)
        self._moments = moments
        self._injector = FaultInjector(spec.faults, host.member, host.die, self._announce, host.sleep)
        self._agreed_settings = settings_to_agree(spec, self._state)
        self._held: Held | None = None
        self._due: tuple[m.Commit, dict[int, int]] | None = None  # what is to be done, and where the data stand
        self._to_save: m.Stop | None = None
        self._stands: dict[int, int] = {}  # data positions after the last inner step
        self._left = self._planned = self._target = self._apply_at = self._incarnation = 0
        self._leaving = ""
        self.step_number = self.rounds = 0
        self.members: tuple[int, ...] = ()
        self._trained = False
        self.stopped: str | None = None
        self._began_anew = False  # inside of the step that the loop is in
        self._enter("")
        self._state.forget()
        self._round_begins = True  # for the loop, with its next turn

    # ---- what a train loop uses ----------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether all rounds are done, or the run was stopped.

        What is due after a round (a checkpoint, an evaluation, a state for a joiner) is done here, or in the next
        `step` if that comes first: by then a loop has stepped its scheduler, and updated its average of the weights.
        """
        self.settle()
        self._pause_if_asked()
        return self._over

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
        self._inner.unscale()
        skipped = self._spec.skip_nonfinite and self._skip(loss, samples)
        if not skipped:
            self._work.add(loss, tokens)
        last = self._left == 1 and not self._leaving
        if self._spec.faults and self._left == (self._planned + 1) // 2:
            self._injector.at("inner", self.rounds + 1, self._parts.model)
        at = self._target if last else self.step_number + 1
        early = last and self._ops(at)[0].point == "after_backward"
        if early and not self._synchronise(at):
            return
        if early or not skipped:  # what all replicas step with must be stepped by all
            self._inner.take(self.step_number)
        self._left -= 1
        self._work.beyond += 1
        self.step_number = at
        if last and not early and not self._synchronise(at):
            return
        self._finish_if_applied()
        if not self._trained:
            self._state.optimizer.check()
            self._trained = True
        self._watch.mark()
        self._stands = self._positions()

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Numbers of your own by name, at any time: means over this round and over the replicas that gave them.

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
        if self._due is not None:
            (commit, positions), self._due = self._due, None
            self._do_duties(commit, positions)
            self._watch.mark()
        if self._over:
            self._watch.close()

    @property
    def _over(self) -> bool:
        return self.stopped is not None or self._left == 0

    def _pause_if_asked(self) -> None:
        """Where the run is being stopped: save what has been done since the last round, and leave."""
        if self._over or self._held is not None or not self._host.channel.stop_asked():
            return
        answer = self._host.channel.request(m.Paused(self._host.member, self._incarnation, self.rounds))
        if isinstance(answer, m.Stop):
            self.stopped = answer.reason
            self._save_between(answer)
            self._watch.close()

    def _save_between(self, stop: m.Stop) -> None:
        if stop.checkpoint is not None:
            self._duties.save(self.rounds, stop.checkpoint, stop.write_shared, self._stands, between=True)

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

    def _skip(self, loss: Tensor, samples: Samples) -> bool:
        """Whether something is not finite, and this step is not to be taken."""
        what = self._skipping.problem(loss)
        if not what:
            self._skipping.taken()
            return False
        self._work.skipped += 1
        self._skipping.put_back()
        if text := self._skipping.said(self.step_number + 1, what, samples):
            self._say(text)
        self._inner.drop()
        return True

    def _say(self, text: str) -> None:
        self._host.channel.request(m.Said(self._host.member, text))

    def _check_loop(self) -> None:
        if said := self._watch.check(self.step_number):
            self._say(said)
        if not self._trained:
            averaged = self._ops(self._target)[0].point == "after_backward"
            check_gradients(self._state.tracks.parameters, self._parts.clip_norm is not None, averaged)

    @property
    def digest(self) -> str | None:
        """Digest of the shared state; None where replicas are not kept consistent, or if this one missed the end."""
        known = self._parties.strategy.consistent and self._incarnation > 0 and self.stopped is None
        return self._parties.strategy.digest() if known else None

    @property
    def unshared_steps(self) -> int:
        """Inner steps since the last round."""
        return self._work.steps

    # ---- steps ----------------------------------------------------------------------------------------------------

    def _ops(self, step: int) -> tuple[SyncOp, ...]:
        """The strategy's ops at `step`, and with them those of the buffers."""
        overlap = self._spec.strategy.overlap_steps
        ops = self._schedule.ops(step, overlap if isinstance(overlap, int) else 0)
        return ops + self._state.buffers.ops(step, max(op.apply for op in ops), ops[0].point)

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def _synchronise(self, step: int) -> bool:
        """Run the round that ends at `step`; False: this replica was given up and has joined again, or must stop."""
        self._watch.check_layout()
        seat = Seat(self._host.member, self._incarnation, self.rounds, self._history)
        run = Round(self._parties, seat, lambda phase: self._injector.at(phase, self.rounds + 1, self._parts.model))
        ops = self._ops(step)
        outcome = run.run(ops, self._work, self._positions(), self._skipping.hopeless)
        if isinstance(outcome, m.Stop):
            self.stopped = outcome.reason
            if ops[0].point == "after_backward":  # the loop has not stepped its scheduler for what is given up here
                self._work.restart()
                self._save_between(outcome)
            else:
                self._to_save, self._stands = outcome, self._positions()
            return False
        if isinstance(outcome, m.Reset):
            self._inner.drop()
            self._enter(outcome.reason, outcome.shared)
            self._began_anew = True
            return False
        self._held, self._history = outcome, run.committed
        self.members = outcome.results[0][2].members
        self._work.restart()
        if outcome.commit.dealt and self._deal(outcome.commit.dealt) and self._parts.data is not None:
            self._parts.data.load(outcome.commit.positions)
        self._leaving = outcome.commit.leave
        self.rounds = outcome.commit.round
        self._apply_at = max(op.apply for op in ops)
        if self._apply_at == step:
            self._apply(outcome)
        # inner steps are counted from where the round is applied, the target is where the next one is launched
        to_apply = self._apply_at - step + (ops[0].point == "after_backward")
        self._planned = self._left = outcome.commit.inner_steps + to_apply
        self._target = self._schedule.next_step(step) or step
        return True

    def _positions(self) -> dict[int, int]:
        return dict(self._parts.data.positions) if self._parts.data is not None else {}

    def _apply(self, held: Held) -> None:
        began = time.perf_counter()
        for op, proposal, received in held.results:
            self._parties.owner(op).apply(proposal, received)
        self._skipping.keep()
        self._work.outer_s += time.perf_counter() - began
        synced = any(op.track == PARAMS for op, _, _ in held.results)
        if synced and self._spec.state_on_sync == "reset":
            self._state.optimizer.reset()

    def _finish_if_applied(self) -> None:
        if self._held is not None and self.step_number >= self._apply_at:
            self._finish_round(self._held.commit)

    def _finish_round(self, commit: m.Commit) -> None:
        """Everything of a round is applied; what is due then waits for the loop to come back."""
        held, self._held = self._held, None
        if held is not None and any(op.apply > op.launch for op, _, _ in held.results):
            began = time.perf_counter()
            self._apply(held)
            self._work.since += time.perf_counter() - began
        self._due = commit, self._positions()
        self._round_begins = True
        self._work.beyond = 0
        if commit.leave:
            self.stopped = commit.leave

    def _do_duties(self, commit: m.Commit, positions: dict[int, int]) -> None:
        began = time.perf_counter()
        self._duties.do(commit, positions, self._parts)
        self._work.since += time.perf_counter() - began  # duties are no compute

    # ---- coming and going -----------------------------------------------------------------------------------------

    def _enter(self, reason: str, shared: bool = True) -> None:
        """Join the fleet and take over its state; the work done since the last commit is given up and counted."""
        holds = self._holds() if shared else None
        self._held = self._due = None
        while True:
            answer = self._host.channel.request(self._join(reason, holds))
            if isinstance(answer, m.Stop):
                self._left, self.stopped = 0, answer.reason
                return
            if not isinstance(answer, m.Welcome):
                raise FleetError(f"the driver answered {type(answer).__name__} to a replica that joins")
            self._work.restart()
            try:
                self._take_over(answer)
                break
            except ExchangeError as error:
                reason, holds = f"the state offered could not be fetched: {error}", None
        notes, self._state.notes = self._state.notes, []
        for text in notes:
            self._say(text)
        if answer.serve:
            self._duties.serve(answer.round, answer.serve)
        if answer.evaluate:
            self._duties.evaluate(answer.round, self._parts.evaluate)
        self._watch.mark()
        self._stands = self._positions()
        self._work.since = time.perf_counter()
        if answer.inner_steps and self._left == 0:
            self._synchronise(self._target)
            self._finish_if_applied()

    def _join(self, reason: str, holds: str | None) -> m.Join:
        return m.Join(
            member=self._host.member,
            digest=self._state.digest(),
            config=self._agreed_settings,
            moments=self._moments,
            endpoint=self._host.transport.endpoint,
            remarks=self._remarks(),
            steps_lost=self._work.steps,
            reason=reason,
            holds=holds,
        )

    def _remarks(self) -> tuple[str, ...]:
        left = unheld(self._state.tracks)
        of_strategy = strategies.remarks(self._parties.strategy, self._spec.strategy, self._spec.steps)
        idle, alone = self._state.buffers.idle, unsaved_scheduler(self._parts)
        return of_strategy + tuple(text for text in (left, idle, alone, *self._parts.remarks) if text)

    def _holds(self) -> str | None:
        """Digest of the committed history whose shared state this replica holds, whole and finite; None without one."""
        whole = self._incarnation and self._held is None and self._state.shared_is_finite()
        return self._history if whole else None

    def _take_over(self, welcome: m.Welcome) -> None:
        host, seed = self._host, self._spec.run.seed
        self._incarnation, self._history = welcome.incarnation, welcome.history
        self.rounds, self.step_number = welcome.round, welcome.step
        self._planned = self._left = welcome.inner_steps
        self._target = self._schedule.next_step(welcome.step) or welcome.step
        self._injector.fired |= set(welcome.fired)
        randomness.seed_all(randomness.replica_seed(seed, host.member, welcome.incarnation))
        self._deal(welcome.dealt)  # before the state, which may be of just these shards
        if welcome.keep:
            self._skipping.put_back()
            self._state.begin_again()
        elif welcome.state is not None:
            self._state.load_as_joiner(host.transport.fetch(welcome.state))
        elif welcome.restore is not None:
            self._duties.restore(welcome.restore, welcome.manifest or {}, welcome.dealt)
            self._go_on_between(welcome)
        self._skipping.keep()
        self._skipping.taken()
        if self._parts.data is not None:
            self._parts.data.load(welcome.positions)

    def _go_on_between(self, welcome: m.Welcome) -> None:
        """Part of the round's inner steps may have been done before the run was stopped, all of them at most."""
        self._left = max(0, self._planned - self._work.beyond)
        self.step_number = welcome.step + self._work.beyond if self._left else self._target

    def _deal(self, dealt: tuple[int, ...]) -> bool:
        """These replicas share the data from here on; False: the data cannot be shared anew."""
        data: object = self._parts.data
        if isinstance(data, Dealt):
            data.deal(dealt)
            return True
        return False

    def _announce(self, fault: int) -> None:
        what = f"{self._spec.faults[fault].do} ({self._spec.faults[fault].phase}, round {self.rounds + 1})"
        self._host.channel.request(m.Fired(self._host.member, fault, what))
