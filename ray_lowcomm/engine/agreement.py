"""What all replicas of a run must have alike, and the schedule that follows from it."""

from collections.abc import Sequence

from ray_lowcomm import strategies
from ray_lowcomm.core.schedule import Schedule, SyncOp
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import RunPlan

PARAMETER_TRACKS = ("params", "grads")  # what `dense_bytes` counts
# saved state means nothing under another one of these
STATE_DEPENDS_ON = frozenset(
    ("strategy.name", "strategy.variant", "strategy.residual", "inner.optimizer", "optimizer.moments")
)
SHARDS = "fleet.shards_per_replica"
LAYOUT, DENSE_BYTES = "model.layout", "model.dense_bytes"
# of another model the loading says which parameter does not fit; whole parameters are put together from any shards
NOT_COMPARED = frozenset((LAYOUT, DENSE_BYTES))
# what hashes cannot say
ADVICE = {
    LAYOUT: "its trainable parameters have other names, shapes or types: build the same model in every "
    "replica, and shard it alike",
    "model.frozen": "its frozen weights are others, and nobody ever exchanges them: load the same into every replica, "
    "or make them right at the start of the train function, where random numbers are still alike",
}


class Agreement:
    """The settings of the first replica that joins; all others must have the same."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._schedule: Schedule | None = None
        self.settings: dict[str, str] = {}

    def differences(self, join: m.Join) -> str:
        """What differs in a joining replica, field by field; '' if nothing does."""
        mine = join.config | {"optimizer.moments": ",".join(join.moments)}
        if self._schedule is None:
            plan, self.settings = self._plan, mine
            self._schedule = strategies.schedule(plan.strategy, join.moments, plan.run.seed, plan.total)
        differing = {k: (v, self.settings.get(k)) for k, v in mine.items() if v != self.settings.get(k)}
        if LAYOUT in differing:
            differing.pop(DENSE_BYTES, None)  # follow from it
        return "; ".join(
            ADVICE.get(k, f"{k} is {v!r} there and {other!r} elsewhere") for k, (v, other) in differing.items()
        )

    def adopt(self, settings: dict[str, str]) -> None:
        """Go on with what a fleet had agreed on."""
        moments = tuple(name for name in settings["optimizer.moments"].split(",") if name)
        self.settings = settings
        self._schedule = strategies.schedule(self._plan.strategy, moments, self._plan.run.seed, self._plan.total)

    def changes_since(self, before: dict[str, str]) -> tuple[str, str]:
        """Settings that differ from those of a checkpoint: (such as make its state useless, others)."""
        mine, before = {SHARDS: "1"} | self.settings, {SHARDS: "1"} | before  # older runs had replicas of one process
        names = sorted(n for n in mine.keys() | before.keys() if mine.get(n) != before.get(n) and n not in NOT_COMPARED)
        if SHARDS in names:  # what is frozen is cut elsewhere, and has other digests
            names = [n for n in names if n != "model.frozen"]
        texts = {n: f"{n} was {before.get(n)}, is {mine.get(n)}" for n in names}
        fatal = [text for name, text in texts.items() if name in STATE_DEPENDS_ON]
        return "; ".join(fatal), "; ".join(text for name, text in texts.items() if name not in STATE_DEPENDS_ON)

    def dense_bytes(self, ops: Sequence[SyncOp]) -> int:
        """Bytes of dense messages of the parameters, or of those fragments of them, that `ops` synchronise."""
        parts = [int(nbytes) for nbytes in self.settings[DENSE_BYTES].split(",")]
        sent = {op.fragment for op in ops if op.track in PARAMETER_TRACKS}
        return sum(nbytes for fragment, nbytes in enumerate(parts) if None in sent or fragment in sent)

    def next_launch(self, launched: int) -> int | None:
        """Nominal step at which the round after the one launched at `launched` is; None after the last."""
        return self._known().next_step(launched)

    def steps_to_next(self, launched: int) -> int:
        """Nominal inner steps from that launch to the next one; 0 after the last."""
        following = self.next_launch(launched)
        return 0 if following is None else following - launched

    def next_ops(self, launched: int, overlap: int) -> tuple[SyncOp, ...]:
        """Ops of that next round, which is applied `overlap` steps after its launch."""
        return self._known().ops(self.next_launch(launched) or self._plan.total, overlap)

    def most_overlap(self, launched: int) -> int:
        """Steps from that next launch to the one after it, beside which its exchange may be; 0 where it is the last."""
        following = self.next_launch(launched)
        return 0 if following is None else self.steps_to_next(following)

    def _known(self) -> Schedule:
        assert self._schedule is not None, "nobody has joined yet"
        return self._schedule
