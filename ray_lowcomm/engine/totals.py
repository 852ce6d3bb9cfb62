"""What a run has done so far, in numbers: the source of round records and of the summary."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ray_lowcomm.engine.membership import weights_of
from ray_lowcomm.engine.messages import Arrival, Bytes, Vote
from ray_lowcomm.engine.reported import combined
from ray_lowcomm.engine.transport import KINDS


@dataclass
class Totals:
    """Sums over a run, resumed parts included.

    `bytes_up` and `bytes_down` are sums over its rounds, each of the replica with most in that round; `bytes` is by
    member; both with all attempts. Times are in seconds, means over the members of a round, summed over committed
    rounds: `exchange_s` and `wait_s` as long as they took, `compute_s` in inner steps, `outer_s` and `blocked_s` in
    between, in the outer step's computation and waiting. `most_members` took part in one round; `replicas_joined`
    counts starts of a replica in mid-run, `replicas_left` those that left in order before the end. `lost_residual`
    counts numbers of an owners' residual (`strategy.combine: sharded`) that were gone with who held them,
    `lost_residual_norm` is the L2 norm of what replicas that were lost held back of earlier rounds. `rejected` is by
    replica: rejected rounds (something was not finite), and how many in a row; `skipped_steps` are inner steps not
    taken for that reason. `replicas_different` counts those that were reset since their shared state was not that of
    the majority. `possible_steps` are the inner steps that all members could have taken in the time of all rounds.
    `caught_up_rounds` are those that replicas had missed and followed later. `metrics` are the
    last values of the user's own.
    """

    inner_steps: int = 0
    possible_steps: float = 0.0
    tokens: int = 0
    dense_bytes: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    bytes: dict[int, Bytes] = field(default_factory=dict)
    state_transfer_bytes: int = 0
    caught_up_rounds: int = 0
    catch_up_bytes: int = 0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    outer_s: float = 0.0
    blocked_s: float = 0.0
    wall_s: float = 0.0
    members_lost: int = 0
    most_members: int = 0
    replicas_joined: int = 0
    replicas_left: int = 0
    replicas_different: int = 0
    rounds_retried: int = 0
    driver_restarts: int = 0
    cohort_restarts: int = 0
    nonfinite_rejected: int = 0
    rejected: dict[str, dict[str, int]] = field(default_factory=dict)
    skipped_steps: int = 0
    lost_inner_steps: int = 0
    lost_residual: int = 0
    lost_residual_norm: float = 0.0
    train_loss: float | None = None
    val_loss: float | None = None
    val_loss_start: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)

    def count_bytes(self, member: int, moved: Bytes) -> None:
        """Add what one attempt of one member moved."""
        sums = self.bytes.setdefault(member, dict.fromkeys(KINDS, 0))
        for kind in KINDS:
            sums[kind] += moved.get(kind, 0)

    def count_rejected(self, member: int) -> None:
        """A replica's round was rejected."""
        self.nonfinite_rejected += 1
        counts = self.rejected.setdefault(str(member), {"rounds": 0, "in_a_row": 0, "most_in_a_row": 0})
        counts["rounds"] += 1
        counts["in_a_row"] += 1
        counts["most_in_a_row"] = max(counts["most_in_a_row"], counts["in_a_row"])

    def count_accepted(self, member: int) -> None:
        """A replica took part in a round that is committed."""
        if str(member) in self.rejected:
            self.rejected[str(member)]["in_a_row"] = 0

    def most(self, kind: str) -> int:
        """The sum of one kind, of the replica with most."""
        return max((sums[kind] for sums in self.bytes.values()), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the manifest of a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Totals":
        """Inverse of `to_json` (JSON makes text of the members' numbers)."""
        by_member = {int(member): sums for member, sums in data["bytes"].items()}
        return cls(**{**data, "bytes": by_member})

    def summary(self) -> dict[str, Any]:
        """The numeric fields of summary.json."""
        up, down = self.bytes_up, self.bytes_down
        all_s = self.compute_s + self.outer_s + self.blocked_s
        return {
            "inner_steps": self.inner_steps,
            "tokens": self.tokens,
            "train_loss": self.train_loss,
            "val_loss": self.val_loss,
            "val_loss_start": self.val_loss_start,
            "metrics": dict(self.metrics),
            "dense_bytes": self.dense_bytes,
            "bytes_up": up,
            "bytes_down": down,
            "buffer_bytes": self.most("buffer"),
            "wire_bytes_up": self.most("wire_up"),
            "wire_bytes_down": self.most("wire_down"),
            "state_transfer_bytes": self.state_transfer_bytes,
            "caught_up_rounds": self.caught_up_rounds,
            "catch_up_bytes": self.catch_up_bytes,
            "compression_up": self.dense_bytes / up if up else None,
            "compression_down": self.dense_bytes / down if down else None,
            "compute_s": round(self.compute_s, 3),
            "exchange_s": round(self.exchange_s, 3),
            "wait_s": round(self.wait_s, 3),
            "outer_s": round(self.outer_s, 3),
            "blocked_s": round(self.blocked_s, 3),
            "wall_s": round(self.wall_s, 3),
            "utilisation": round(self.compute_s / all_s, 4) if all_s else None,
            "goodput": round(self.inner_steps / self.possible_steps, 4) if self.possible_steps else None,
            "members_lost": self.members_lost,
            "replicas_joined": self.replicas_joined,
            "replicas_left": self.replicas_left,
            "replicas_different": self.replicas_different,
            "rounds_retried": self.rounds_retried,
            "driver_restarts": self.driver_restarts,
            "cohort_restarts": self.cohort_restarts,
            "nonfinite_rejected": self.nonfinite_rejected,
            "rejected_replicas": {i: r for i, r in sorted(self.rejected.items()) if r["most_in_a_row"] > 1},
            "skipped_steps": self.skipped_steps,
            "lost_inner_steps": self.lost_inner_steps,
            "lost_residual": self.lost_residual,
            "lost_residual_norm": round(self.lost_residual_norm, 6),
        }


def round_record(
    position: tuple[int, int, int], arrivals: list[Arrival], votes: list[Vote], moved: list[Bytes], retries: int
) -> dict[str, Any]:
    """A line of rounds.jsonl. `position` is (round, step, generation); `moved` are the members' bytes in this round,
    `steps` in it the inner steps of each of them.

    Loss is the mean over replicas with the weights of the parameters' mean, times are plain means, bytes those of the
    replica with most in this round. `compute_s` are the seconds in inner steps; `outer_s` and `blocked_s` as in `Vote`:
    as a round is applied after its record is made, they are of applying the one before, and of waiting for it where it
    was exchanged beside inner steps. Spread is the root mean square, over replicas, of the L2 distance between a
    replica's parameters and the shared ones after this round.
    """
    weights = weights_of(arrivals)
    own = combined((arrival.metrics, weight) for arrival, weight in zip(arrivals, weights, strict=True))
    losses = [(a.loss, w) for a, w in zip(arrivals, weights, strict=True) if w and a.loss is not None]
    known = 1.0 if len(losses) == len(arrivals) else sum(weight for _, weight in losses)
    distance = root_of_squares([a.residual_norm for a in arrivals])
    spread = None if distance is None else distance / len(arrivals) ** 0.5
    return {
        "round": position[0],
        "step": position[1],
        "generation": position[2],
        "members": [a.member for a in arrivals],
        "steps": [a.steps for a in arrivals],
        "loss": sum(loss * weight for loss, weight in losses) / known if losses else None,
        "val_loss": None,
        "bytes_up": most(moved, "up"),
        "bytes_down": most(moved, "down"),
        "compute_s": _mean([a.compute_s for a in arrivals]),
        "exchange_s": _mean([v.exchange_s for v in votes]),
        "wait_s": _mean([v.wait_s for v in votes]),
        "outer_s": _mean([v.outer_s for v in votes]),
        "blocked_s": _mean([v.blocked_s for v in votes]),
        "retries": retries,
        "skipped_steps": sum(a.skipped for a in arrivals),
        "spread": spread,
        **own,
    }


def most(moved: Iterable[Bytes], kind: str) -> int:
    """What the member with most has moved."""
    return max((bytes_of.get(kind, 0) for bytes_of in moved), default=0)


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def root_of_squares(norms: list[float | None]) -> float | None:
    """L2 norm of several parts from theirs; None if one of them is not known."""
    known = [norm for norm in norms if norm is not None]
    return sum(norm**2 for norm in known) ** 0.5 if len(known) == len(norms) else None
