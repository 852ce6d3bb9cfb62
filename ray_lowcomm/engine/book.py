"""What the coordinator writes down: records, bytes, checkpoints in the making. No decisions."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ray_lowcomm import strategies
from ray_lowcomm.core.settings import CheckpointSettings, Fault, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.making import FORMAT, Making, Makings, checkpoint_folder, shards_of
from ray_lowcomm.engine.membership import Exchange, Member
from ray_lowcomm.engine.reported import TAKEN, combined
from ray_lowcomm.engine.totals import Totals, most, round_record


@dataclass(frozen=True)
class RunPlan:
    """What the coordinator needs to know of a run. `total` are nominal inner steps; `restore` is a checkpoint to start
    from (a whole path or URI), `restored` its manifest; of `faults` it looks after those that hold replicas back."""

    run: RunSettings
    checkpoint: CheckpointSettings
    strategy: StrategySettings
    fleet: FleetSettings
    total: int
    directory: str
    restore: str | None = None
    restored: dict[str, Any] | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def head(self) -> dict[str, Any]:
        """The fields of summary.json that are known before anything is trained."""
        shards = self.fleet.shards_per_replica
        return {"run_name": self.run.name, "strategy": self.strategy.name, "shards_per_replica": shards}

    @property
    def fired(self) -> tuple[int, ...]:
        """Entries of the fault schedule that had happened when it was started."""
        return tuple((self.restored or {}).get("fired", ()))

    @property
    def catches_up(self) -> bool:
        """Whether a replica that has missed rounds keeps its work and follows them."""
        return strategies.straggler(self.strategy, self.fleet) == "catch_up"

    @property
    def kept_rounds(self) -> int:
        """How many rounds an absent replica may miss; a round of fragments is one of all of them."""
        return self.fleet.keep_rounds * (self.strategy.fragments or 1)


@dataclass(frozen=True)
class Event:
    """For the host. Kinds: `record` (a round), `start_loss`, `notice` (text), `manifest` (folder, manifest: the
    checkpoint is whole, write it), `discarded` (folder: nothing will come of it, delete it), `joined` (a replica that
    waits to begin), `loaded` (what one has said that has loaded a state of the others, of which round it is, and when
    that was), `fired` (number of a fault that happens), `left` (one that was asked to leave and is gone), `stopped`
    (why the fleet itself stops the run), `failed` (text, traceback), `ended` (whether it was the whole run). Where
    replicas are processes their host adds `output` (replica, lines that it has printed)."""

    kind: str
    data: Any = None


@dataclass
class Position:
    """Where a run stands after its last committed round: launched at nominal step `launched`, applied at `step`.
    `history` is the digest of all commits; `overlap` is how much later than launched the next round is applied."""

    round: int = 0
    step: int = 0
    generation: int = 0
    history: str = ""
    launched: int = 0
    overlap: int = 0

    @property
    def late(self) -> int:
        """Steps from the launch of the last round to where it is applied."""
        return self.step - self.launched


class Book:
    """Totals, the round record that waits for its validation loss, and checkpoints that wait for their parts."""

    def __init__(self, plan: RunPlan, now: float) -> None:
        self.plan = plan
        self.events: list[Event] = []
        self.totals = Totals()
        self.data_positions: dict[int, int] = {}
        self.fired: set[int] = set()
        self.digests: dict[int, str | None] = {}
        self.begun = now
        self.counted_to: float | None = None  # second up to which `possible_steps` are counted
        self.moved: dict[int, m.Bytes] = {}
        self.record: tuple[int, dict[str, Any]] | None = None  # (evaluator, record)
        self.makings = Makings(self.notice, lambda kind, data: self.events.append(Event(kind, data)))
        self.said_twice: set[str] = set()  # names of metrics that loop and evaluation both give

    def notice(self, text: str) -> None:
        """Say something to the user."""
        self.events.append(Event("notice", text))

    def fire(self, number: int, what: str, member: int) -> None:
        """This entry of the fault schedule happens now."""
        self.fired.add(number)
        self.events.append(Event("fired", number))
        self.notice(f"fault {number} of the schedule: {what} at replica {member}")

    # ---- rounds ---------------------------------------------------------------------------------------------------

    def add_vote(self, vote: m.Vote) -> None:
        """Count the bytes of one attempt of one member."""
        self.totals.count_bytes(vote.member, vote.bytes)
        moved = self.moved.setdefault(vote.member, {})
        for kind, amount in vote.bytes.items():
            moved[kind] = moved.get(kind, 0) + amount

    def reject(self, member: Member, arrival: m.Arrival) -> None:
        """Count a replica's round that is rejected. Its samples are used: it goes on with others."""
        self.totals.count_rejected(arrival.member)
        self.totals.skipped_steps += arrival.skipped
        member.skipped = arrival.skipped
        self.data_positions.update(arrival.positions)

    def count_state_transfer(self, donor: int, joiner: int, nbytes: int) -> None:
        """Count a state that goes from a donor to a joiner."""
        self.totals.state_transfer_bytes += nbytes
        self.totals.count_bytes(donor, {"wire_up": nbytes})
        self.totals.count_bytes(joiner, {"wire_down": nbytes})

    def count_catch_up(self, done: m.CaughtUp) -> None:
        """Count rounds that a replica has followed, and the bytes of it."""
        self.totals.caught_up_rounds += done.rounds
        for donor, nbytes in done.fetched.items():
            self.totals.catch_up_bytes += nbytes
            self.totals.count_bytes(donor, {"wire_up": nbytes})
            self.totals.count_bytes(done.member, {"wire_down": nbytes})
        rounds = f"{done.rounds} round" + "s" * (done.rounds != 1)
        self.notice(f"replica {done.member} is back: it has followed {rounds}, {sum(done.fetched.values()):,} bytes")

    def commit(self, where: Position, arrivals: list[m.Arrival], votes: list[m.Vote], retries: int) -> dict[str, Any]:
        """Count a committed round; returns its record."""
        self.flush(None)
        self._keep_totals()
        self.totals.most_members = max(self.totals.most_members, len(arrivals))
        for arrival in arrivals:
            self.data_positions.update(arrival.positions)
            self.totals.inner_steps += arrival.steps
            self.totals.tokens += arrival.tokens
            self.totals.skipped_steps += arrival.skipped
            if arrival.steps:
                self.totals.count_accepted(arrival.member)
        moved = list(self.moved.values())
        place = where.round, where.launched, where.generation
        record = round_record(place, arrivals, votes, moved, retries) | {"overlap_steps": where.late}
        if record["loss"] is not None:
            self.totals.train_loss = record["loss"]
        self.totals.metrics.update({name: value for name, value in record.items() if name not in TAKEN})
        self._count_residual_lost(where.round, sum(vote.residual_lost for vote in votes))
        for kind in ("compute_s", "exchange_s", "wait_s", "outer_s", "blocked_s"):
            setattr(self.totals, kind, getattr(self.totals, kind) + record[kind])
        self._close_moved()
        return record

    def count_possible(self, now: float, members: Collection[int], paces: Mapping[int, float]) -> None:
        """Count the inner steps that all of these `members` could have taken since this was last called, at their last
        `paces`, in seconds a step. Not where replicas share a process: they take turns, and time is virtual."""
        known = [pace for pace in paces.values() if pace > 0]
        before, self.counted_to = self.counted_to, now
        if before is not None and known and self.plan.fleet.transport != "local":
            mean = sum(known) / len(known)
            self.totals.possible_steps += sum((now - before) / (paces.get(i) or mean) for i in members)

    def _close_moved(self) -> None:
        """Add what the members have moved since the last round to the run's bytes."""
        self.totals.bytes_up += most(self.moved.values(), "up")
        self.totals.bytes_down += most(self.moved.values(), "down")
        self.moved = {}

    def _count_residual_lost(self, number: int, count: int) -> None:
        self.totals.lost_residual += count
        if count:
            self.notice(f"round {number}: {count:,} numbers of the owners' residual are lost: nobody holds them now")

    def count_failed(self, votes: list[m.Vote]) -> None:
        """Count the time of an attempt that has failed; bytes are counted with each vote."""
        for name in ("exchange_s", "wait_s"):
            seconds = [getattr(vote, name) for vote in votes]
            setattr(self.totals, name, getattr(self.totals, name) + sum(seconds) / max(1, len(seconds)))

    def count_lost(self, member: Member, exchange: Exchange | None) -> None:
        """Count a member that is lost. Steps of a killed replica are unknown: those that it was told to take count,
        those beside a round in flight among them; one that was not heard of may have launched a round as well."""
        self.totals.members_lost += 1
        self.totals.lost_residual_norm = math.hypot(self.totals.lost_residual_norm, member.held_back)
        arrival = member.arrival
        launched = arrival.steps + arrival.skipped if arrival else 0
        self.count_unshared(member)
        in_exchange = exchange is not None and member.index in exchange.members
        if exchange is not None and in_exchange and member.vote is not None and member.vote.ok:
            self.totals.lost_inner_steps -= launched
            exchange.owed += launched  # lost only if the exchange fails

    def count_unshared(self, member: Member) -> int:
        """Count as lost what a member has not shared, as far as it is known (see `count_lost`): returns how many
        steps. Should it ever be back it says more."""
        arrival, before = member.arrival, member.counted
        steps = arrival.steps + arrival.skipped if arrival else member.planned
        member.counted = steps + (member.beside if arrival or member.silent_since is not None else 0)
        self.totals.lost_inner_steps += member.counted - before
        return member.counted

    def count_left_out(self, member: Member) -> None:
        """The run ends while a member is away: what it has not shared is lost, if it is more than a state to load."""
        if member.loads is None and not member.counted and (steps := self.count_unshared(member)):
            self.notice(f"replica {member.index} was not back at the end: its {steps} steps are lost")

    def count_given_up(self, member: Member | None, steps: int, skipped: int) -> None:
        """Count what a replica that is alive has given up, in the place of what was counted without its word."""
        self.totals.lost_inner_steps += steps - (member.counted if member else 0)
        self.totals.skipped_steps += skipped - (member.skipped if member else 0)

    def hold(self, evaluator: int, record: dict[str, Any], evaluated: bool) -> None:
        """Keep the record until its evaluator reports, or emit it at once."""
        self.record = (evaluator, record)
        if not evaluated:
            self.flush(None)

    def evaluated(self, done: m.Evaluated) -> None:
        """A validation loss has come in."""
        if done.round == 0:
            self.totals.val_loss_start = done.val_loss
            self.events.append(Event("start_loss", done.val_loss))
        elif self.record is not None and (self.record[0], self.record[1]["round"]) == (done.member, done.round):
            self.flush(done.val_loss, metrics=done.metrics)

    def flush(
        self, val_loss: float | None, evaluator: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Emit the record that is held (if it waits for `evaluator`, or for anybody)."""
        if self.record is None or (evaluator is not None and self.record[0] != evaluator):
            return
        own = combined([(metrics or {}, 1.0)])
        for name in sorted((own.keys() & self.record[1].keys()) - self.said_twice):
            self.said_twice.add(name)
            self.notice(
                f"{name} is given by `replica.report` and by `evaluate`: where there are both, the latter counts"
            )
        record = self.record[1] | {"val_loss": val_loss} | own
        self.totals.metrics.update(own)
        self.record = None
        if val_loss is not None:
            self.totals.val_loss = val_loss
        self.events.append(Event("record", record))

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def open_checkpoint(
        self, where: Position, members: list[int], now: float, stop: int = 0, last: bool = False
    ) -> str:
        """Expect a part of each member, of the run as it stands; returns the folder."""
        folder = checkpoint_folder(where.round, stop)
        stood: dict[str, Any] = {"round": where.round, "stop": stop, "step": where.step, "launched": where.launched}
        stood |= {"overlap": where.overlap, "generation": where.generation, "history": where.history}
        self.makings.begin(Making(where.round, folder, set(members), now, stood, last))
        return folder

    def _keep_totals(self) -> None:
        """For the manifests of checkpoints whose files are still being written as the next round is committed."""
        for making in self.makings.all():
            if "totals" not in making.stood:
                making.stood |= self._sums()

    def _sums(self) -> dict[str, Any]:
        positions = {str(k): v for k, v in self.data_positions.items()}
        return {"totals": self.totals.to_json(), "fired": sorted(self.fired), "positions": positions}

    def close_checkpoint(self, folder: str, config: dict[str, str] | None, now: float) -> dict[str, Any]:
        """The manifest of the checkpoint that has become whole."""
        making = self.makings.close(folder)
        parts = dict(sorted(making.parts.items()))
        if "totals" not in making.stood:  # no round has been committed since
            for part in parts.values():
                self.data_positions.update(part.positions)
        manifest = self._sums() | making.stood
        manifest["totals"]["wall_s"] = self.totals.wall_s + now - self.begun
        for part in parts.values():
            manifest["positions"] |= {str(k): v for k, v in part.positions.items()}
        manifest |= {
            "format": FORMAT,
            "replicas": self.plan.fleet.max_replicas,
            "members": list(parts),
            "strategy": self.plan.strategy.name,
            "config": config,
            "unshared": {str(i): [part.steps, part.tokens, part.skipped] for i, part in parts.items()},
            "files": {name: list(info) for part in parts.values() for name, info in part.files.items()},
        }
        shards = shards_of(manifest["files"])
        manifest |= {"shards": shards} if shards > 1 else {}
        self.events.append(Event("manifest", (folder, manifest)))
        return manifest

    def take_manifest(self, manifest: dict[str, Any]) -> Position:
        """Go on from a manifest, in a new process."""
        self.totals = Totals.from_json(manifest["totals"])
        return self._stand_at(manifest)

    def count_missing(self, manifest: dict[str, Any], present: Collection[int], dealt: Collection[int]) -> None:
        """Count what members of a checkpoint had done since their last launch that are not there to go on with it.

        With fewer replicas it goes out with what the others do, who share the data (`dealt`): who begins with a
        checkpoint begins with the mean of all. Where a missing one has a share of the data, and may come back without
        its state, it is lost.
        """
        missing = {i: done for i, done in manifest.get("unshared", {}).items() if int(i) not in present}
        for index, (steps, tokens, skipped) in missing.items():
            self.totals.skipped_steps += skipped
            if int(index) in dealt:
                self.totals.lost_inner_steps += steps
            else:
                self.totals.inner_steps += steps
                self.totals.tokens += tokens
            if steps:
                what = "are lost" if int(index) in dealt else "go out with those of the others"
                missed = f"{steps} inner steps that it had not shared"
                self.notice(f"replica {index} of the checkpoint is missing: {missed} {what}")

    def go_back(self, manifest: dict[str, Any] | None, other_data: bool = False) -> Position:
        """Back to a manifest, or to the start. What was done since is counted as lost, what was sent stays counted.

        With `other_data` the samples since then stay used: they have led to where nobody can go on.
        """
        self.flush(None)
        safe = manifest["totals"] if manifest is not None else {"inner_steps": 0, "tokens": 0}
        self.totals.lost_inner_steps += self.totals.inner_steps - safe["inner_steps"]
        self.totals.inner_steps, self.totals.tokens = safe["inner_steps"], safe["tokens"]
        self._close_moved()
        self.makings.forget()
        used = self.data_positions if other_data else {}
        where = self._stand_at(manifest) if manifest is not None else Position()
        self.data_positions = {**(self.data_positions if manifest is not None else {}), **used}
        return where

    def _stand_at(self, manifest: dict[str, Any]) -> Position:
        self.data_positions = {int(k): v for k, v in manifest["positions"].items()}
        self.fired |= set(manifest["fired"])
        return Position(
            manifest["round"],
            manifest["step"],
            manifest["generation"],
            manifest["history"],
            manifest["launched"],
            manifest["overlap"],
        )

    def summary(self, rounds: int, now: float) -> dict[str, Any]:
        """Fields of summary.json that follow from what was written down."""
        self._close_moved()  # of a round that was not committed, too
        digests = {str(i): d for i, d in sorted(self.digests.items())}
        fields = self.totals.summary() | {"wall_s": round(self.totals.wall_s + now - self.begun, 3)}
        fleet = self.plan.fleet
        replicas = self.totals.most_members if fleet.elastic else fleet.max_replicas
        return {"rounds": rounds, "replicas": replicas, "state_digests": digests} | fields
