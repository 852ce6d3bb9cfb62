"""What a replica does at the end of a round besides training: serve joiners, evaluate, save, export."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ray_lowcomm import strategies
from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.names import model_state
from ray_lowcomm.core.parts import Target, marks
from ray_lowcomm.core.wording import option
from ray_lowcomm.engine import checkpoint, reported
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.exporting import save_model
from ray_lowcomm.engine.loop_parts import LoopParts
from ray_lowcomm.engine.manifest import shards_in
from ray_lowcomm.engine.offer_names import own_offer, state_offer
from ray_lowcomm.engine.round import Parties
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.engine.state import ReplicaState, SharedParameters
from ray_lowcomm.engine.storage import Storage, persistent
from ray_lowcomm.engine.transport import Pending
from ray_lowcomm.engine.work import Work
from ray_lowcomm.strategies.contract import State

SPACE_WAIT_S = 60.0  # for a disk that is full at the end of a run


@dataclass(frozen=True)
class Save:
    """A checkpoint to write to `folder`: `between` two rounds or after `round`. The `last` one is waited for, where the
    disk is full for `wait_s`."""

    round: int
    folder: str
    write_shared: bool
    last: bool
    wait_s: float = 0.0
    between: bool = False


class Duties:
    """The duties of one replica; each reports to the driver when it is done."""

    def __init__(self, state: ReplicaState, work: Work, parties: Parties, spec: RunSpec, member: int) -> None:
        self._state, self._work, self._faults = state, work, parties.faults
        self._channel, self._transport = parties.channel, parties.transport
        self._directory, self._member = spec.directory, member
        # tracks with periods of their own are not as they were at the last commit: a joiner needs them
        averaged = strategies.algorithm(spec.strategy.name).averages_moments
        self._moments = averaged or spec.fleet.joiner_moments == "donor"
        self._told = False
        self._writing: Pending[None] | None = None

    def do(self, commit: m.Commit, positions: dict[int, int], parts: LoopParts) -> None:
        """All that a commit asks of this member, at data `positions`."""
        if commit.serve:
            self.serve(commit.round, commit.serve_own)
        if commit.evaluate:
            self.evaluate(commit.round, parts.evaluate)
        if commit.export is not None:
            self.export(commit.export, parts.export)
        if commit.checkpoint is not None:
            last = commit.inner_steps == 0
            wait_s = SPACE_WAIT_S if last and not commit.leave else 0.0
            self.save(Save(commit.round, commit.checkpoint, commit.write_shared, last, wait_s), positions)

    def serve(self, number: int, own: bool) -> None:
        """Offer the state at the end of round `number` to joiners: one stamp, taken while nothing is being trained.
        With `own` also what is this replica's alone."""
        strategy, name = self._state.strategy, state_offer(number)
        alike, mine = self._state.for_joiner(self._moments)
        offered = m.Offer(
            self._member,
            number,
            self._transport.offer(name, alike),
            self._transport.offer(own_offer(name), mine) if own else None,
            strategy.digest() if strategy.consistent else "",
        )
        self._channel.request(offered)
        self._faults.at("serving", number)

    def evaluate(self, number: int, evaluate: Callable[[nn.Module], Any] | None) -> None:
        """Validation loss of the shared parameters; the replica's own, its buffers and random state are left alone."""
        val_loss: float | None = None
        metrics: dict[str, float] = {}
        if evaluate is not None:
            with SharedParameters(self._state) as model, torch.no_grad():
                called = f"`evaluate`, called with the shared model at the end of round {number}"
                with self._of_user(called, f"`evaluate` failed at the end of round {number}"):
                    given = evaluate(model)
                val_loss, metrics = reported.evaluated(given)
            if val_loss is not None and not math.isfinite(val_loss):
                said = f"the validation loss is {val_loss}: look for samples of the validation data that are not finite"
                self._channel.request(m.Said(self._member, f"round {number}: {said}"))
            if val_loss is None and not self._told:
                self._told = True
                said = "`evaluate` returned no val_loss: there is no validation loss"
                self._channel.request(m.Said(self._member, said))
        self._channel.request(m.Evaluated(self._member, number, val_loss, metrics))

    @contextmanager
    def _of_user(self, called: str, failed: str, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Context in which a function of the user's is `called`, that is not the train function. A loop that fails says
        so itself; that it was not the loop, only we know."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, expected):
                error.add_note(f"(in {called})")
                self._channel.request(m.Said(self._member, f"{failed} with {type(error).__name__}"))
            raise

    def save(self, save: Save, positions: dict[int, int]) -> None:
        """Have this member's files of a checkpoint written, of a copy, beside what it goes on with; `positions` are its
        data positions. A failure gives up this checkpoint, not the run. The last one needs no copy."""
        if save.last:
            self.finish()
        self.settle()
        state, problem = self._state, ""
        if self._writing is not None:
            problem = "its part of the checkpoint before is still being written"
        elif state.strategy.replicated and not state.finite:
            problem = "parameters are not all finite: nobody could go on from them"
        shard, files = state.tracks.shard, {}
        if save.write_shared and not problem:
            files[checkpoint.shared_name(shard)] = _taken(state.to_save(state.shared()), save)
        if not problem:
            files[checkpoint.local_name(self._member, shard)] = _taken(state.to_save(state.local(save.between)), save)
        done = self._work.steps, self._work.tokens, self._work.skipped
        saved = m.Saved(self._member, save.round, {}, problem, positions, save.folder, *done)
        if problem:
            self._channel.request(saved)
            return
        known = state.targets()
        self._writing = self._transport.beside(lambda: self._write(files, known, saved, save.wait_s))
        if save.last:
            self.finish()

    def _write(self, files: dict[str, State], known: Mapping[str, Target], saved: m.Saved, wait_s: float) -> None:
        written: dict[str, tuple[int, str]] = {}
        problem, storage = "", Storage(self._directory)
        name = ""

        def save(name: str) -> tuple[int, str]:
            if not checkpoint.is_shared(name):  # by now that is written, where it is this member's to write
                self._faults.at("checkpoint", saved.round)
            return checkpoint.save_tensors(storage, f"{saved.folder}/{name}", files[name], marks(files[name], known))

        try:
            for name in list(files):
                written[name] = persistent(partial(save, name), wait_s, partial(self._waits, "the last checkpoint"))
                del files[name]
        except Exception as error:  # whatever it is: other shards of this replica wait for this one's files
            told = f"{type(error).__name__}: {error}"
            problem = told if name in told else f"{name}: {told}"
        self._channel.request(replace(saved, files=written, problem=problem))

    def _waits(self, what: str, why: str) -> None:
        self._channel.request(m.Said(self._member, f"{what} cannot be written: {why}"))

    def settle(self) -> None:
        """Notice that what is written beside has been written."""
        if self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait for it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def restore(self, folder: str, manifest: Mapping[str, Any], members: tuple[int, ...]) -> None:
        """Load this member's state from a checkpoint folder (a whole path or URI); `members` begin with it."""
        root, _, name = folder.rpartition(f"/{checkpoint.FOLDER}/")
        source = checkpoint.Source(Storage(root), f"{checkpoint.FOLDER}/{name}", manifest)
        state = self._state
        needs = checkpoint.Needs(state.tracks.shard, state.targets(), state.cut_off, state.notes.append)

        def load() -> None:
            shared, local = checkpoint.load_member(source, self._member, members, state.unshared, needs)
            if local is None:
                state.load_as_joiner(shared)
                return
            state.load(shared, local)
            if shards_in(manifest) != needs.shard.count:  # each shard has loaded what the first one had done
                _, tokens, _ = manifest["unshared"][str(self._member)]
                self._work.cut_anew(tokens, needs.shard)

        state.together.all_well("a checkpoint", load, CheckpointError)

    def export(self, folder: str, write: Callable[[nn.Module, str], None] | None) -> None:
        """Write the final model: `model.safetensors` with the shared parameters, or whatever `write` makes of it. All
        shards of a replica call this; what one of them cannot write is tried again by all.

        Raises:
            CheckpointError: there is no room for it, or no right to write it.
        """
        together = self._state.together
        with SharedParameters(self._state) as model:

            def work() -> None:
                if write is not None:
                    with self._of_user("`export`, called with the final model", "`export` failed", (OSError,)):
                        write(model, f"{self._directory}/{folder}")
                else:
                    leads = self._state.tracks.shard.number == 0
                    save_model(Storage(self._directory), folder, model_state(model), writes=leads)

            def together_work() -> None:
                together.all_well("the final model", work, OSError)

            try:
                attempt, over = (work, bool) if together.inside.shards == 1 else (together_work, together.any)
                persistent(attempt, SPACE_WAIT_S, partial(self._waits, "the final model"), over)
            except OSError as error:
                mend = f"mend that and go on with {option('run.resume')}"
                raise CheckpointError(f"the final model cannot be written: {error}; {mend}") from error


def _taken(state: Mapping[str, Tensor], save: Save) -> State:
    """As it is now, on the CPU: in memory of its own where the replica goes on meanwhile."""
    return {name: value.detach().to("cpu", copy=not save.last) for name, value in state.items()}
