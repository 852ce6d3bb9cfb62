"""What replicas and the driver say to each other: plain data, sent by whatever transport.

A replica sends a request and gets one answer. `member` is the replica's index in the fleet, 0 <= member < replicas,
and stays the same when the replica is started again; the driver gives each start a new `incarnation`.
"""

from dataclasses import dataclass, field
from typing import Any

from ray_lowcomm.core.remarks import Remark
from ray_lowcomm.core.schedule import SyncOp

Bytes = dict[str, int]  # keys: up, down, buffer, wire_up, wire_down


@dataclass(frozen=True)
class Join:
    """A replica asks to take part.

    `digest` is of its model as built; `config` holds what all replicas must agree on; `moments` are the names of its
    optimizer's moments, from which the schedule follows.
    """

    member: int
    digest: str
    config: dict[str, str]
    moments: tuple[str, ...] = ()
    remarks: tuple[Remark, ...] = ()  # what the user should know about this model with this strategy
    steps_lost: int = 0  # inner steps executed since the last commit and given up by this join
    skipped_lost: int = 0  # further ones that were skipped since then
    reason: str = ""
    holds: str | None = None  # digest of the committed history whose shared state it holds, whole and finite


@dataclass(frozen=True)
class Welcome:
    """Take part from the inner steps of `round` on, which start at nominal step `step`.

    Take `inner_steps` of them from there, then launch the next round, whose nominal step is `launch`: at once where
    they are 0. Where `launch` is None the run has ended. `overlap` as in `Commit`.
    `state` is a live fleet's state at the end of `round`: take it, and come `Back`. `restore` is a checkpoint; with
    `keep` go back to the shared state that you hold, and with none of these keep what you have. `dealt` are
    the replicas that share the data from here on (and that begin together from a checkpoint); `positions` the committed
    data positions of all virtual shards. The rest are duties before the first inner step.
    """

    incarnation: int
    round: int
    step: int
    inner_steps: int
    launch: int | None
    overlap: int
    beside: int
    positions: dict[int, int]
    dealt: tuple[int, ...] = ()
    state: "Offered | None" = None
    restore: str | None = None  # checkpoint folder to load from
    manifest: dict[str, Any] | None = None  # of that checkpoint: the file may not be written yet
    history: str = ""  # digest of the committed history
    serve: tuple[int, ...] = ()
    serve_own: bool = False
    evaluate: bool = False
    fired: tuple[int, ...] = ()  # entries of the fault schedule that have happened
    keep: bool = False


@dataclass(frozen=True)
class Offered:
    """A state that members offer. `sources`: references of the transport, by member, to what all of them have alike;
    `own` to what one of them has; `digest` of the shared state."""

    sources: dict[int, Any]
    own: tuple[int, Any] | None
    digest: str


@dataclass(frozen=True)
class Missed:
    """A committed round as others have received it. `round` counts committed rounds, with this one; `history` is the
    digest of all of them. `sources`: references of the transport, by member, to the parts that were received."""

    round: int
    ops: tuple[SyncOp, ...]
    members: tuple[int, ...]
    weights: tuple[float, ...]
    history: str
    sources: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PayloadSize:
    """Size in bytes of the payload for one op."""

    op: str
    combine: str
    nbytes: int


@dataclass(frozen=True)
class Arrival:
    """A replica has finished its inner steps of `round`. `healthy` False: something non-finite; it sits this one out.

    `digest` is that of the shared state before this round, None where replicas are not kept consistent. `loss` is the
    mean over `steps`, None if there is none or it is not finite; `skipped` are further steps, which were not taken.
    """

    member: int
    incarnation: int
    round: int
    healthy: bool
    steps: int
    tokens: int
    loss: float | None
    compute_s: float
    sizes: tuple[PayloadSize, ...]
    digest: str | None
    positions: dict[int, int]
    residual_norm: float | None = 0.0
    problem: str = ""
    skipped: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # of the user's own, means over this round


@dataclass(frozen=True)
class Plan:
    """Exchange now, as `rank` of `members`, in the collective group of `generation`, within `deadline_s` seconds.

    `sizes[op]` are the payload sizes in rank order.
    """

    generation: int
    round: int
    members: tuple[int, ...]
    weights: tuple[float, ...]
    sizes: dict[str, tuple[int, ...]]
    deadline_s: float

    def rank(self, member: int) -> int:
        """Rank of a member in this generation's group."""
        return self.members.index(member)


@dataclass(frozen=True)
class Vote:
    """Received whole and valid (`ok`), or not and why. `digest` covers the committed history and what was received.

    Seconds: `exchange_s` of this attempt, `wait_s` until its plan came; and, since the vote before, those in which no
    inner step was taken: `outer_s` for the outer step's computation (applying the round before, proposals; where
    nothing is exchanged beside inner steps digests and checks, too), `blocked_s` for waiting. `beside_s`: what is
    computed beside inner steps, to make what is sent and to check what is received. `residual_lost`: numbers of an
    owners' residual that nobody holds any more, in this member's shards. `strays`: sockets that this member holds
    beyond those that it held when its group was formed. `arrival`: its own in this round, for a driver that does not
    know of the exchange, since it was started again.
    """

    member: int
    incarnation: int
    generation: int
    ok: bool
    digest: str = ""
    problem: str = ""
    exchange_s: float = 0.0
    wait_s: float = 0.0
    outer_s: float = 0.0
    blocked_s: float = 0.0
    beside_s: float = 0.0
    bytes: Bytes = field(default_factory=dict)
    residual_lost: int = 0
    strays: int = 0
    arrival: Arrival | None = None


@dataclass(frozen=True)
class Commit:
    """The round is committed: apply what was received. The rest are this member's duties at the end of the round, due
    where it is applied and before the next one is launched, since that waits for those that are served.

    `inner_steps` are to be taken from the launch of this round to that of the next, those that were or will be taken
    before it is applied among them: none may be left once it is applied, and the next launch follows at once. 0: the
    run ends where this round is applied, at least for this member. `overlap`: the next round is applied so many nominal
    steps after its launch, and so are its ops: `Schedule.ops(launch, overlap)`; this member takes `beside` inner steps
    meanwhile, fewer where it is slower (`fleet.pace`).

    Where the replicas that share the data change, `dealt` are the new ones and `positions` where the data stand: only
    with a round that is applied where it was launched, as positions are those of a launch.
    """

    round: int
    inner_steps: int
    overlap: int = 0
    beside: int = 0
    leave: str = ""  # why this member's part in the run ends here
    dealt: tuple[int, ...] = ()
    positions: dict[int, int] = field(default_factory=dict)
    evaluate: bool = False
    checkpoint: str | None = None  # folder to write local state into
    write_shared: bool = False  # write the shared state into it, too
    export: str | None = None  # folder to write the final model into
    serve: tuple[int, ...] = ()  # joining members that wait for a state: offer it
    serve_own: bool = False  # and what not all members have alike
    keep: bool = False  # offer what was received in this round: somebody has missed it
    wanted: tuple[str, ...] = ()  # offers that may still be asked for: others can go


@dataclass(frozen=True)
class Return:
    """Follow what you have `missed`, in order: you then stand at the end of `round`, with all that you have not shared.
    What was open is given up, unless you are a member of the first of them: then apply it with what was received.
    With `again` only fetch them, and ask with `Back` what else was missed meanwhile.

    The rest as in `Welcome`, but for `dealt` and `positions`, which are only there where the data are shared otherwise
    than when you were last told.
    """

    missed: tuple[Missed, ...]
    round: int
    step: int
    inner_steps: int
    launch: int | None
    overlap: int
    beside: int
    history: str
    dealt: tuple[int, ...] = ()
    positions: dict[int, int] = field(default_factory=dict)
    again: bool = False


@dataclass(frozen=True)
class Reset:
    """Give up what is open and join again, for `reason`. `shared`: what it holds of the shared state is right."""

    reason: str
    shared: bool = True


@dataclass(frozen=True)
class Paused:
    """A replica that was asked to stop has come to the end of an inner step of the round after `round` committed ones,
    with nothing of a round left to apply."""

    member: int
    incarnation: int
    round: int


@dataclass(frozen=True)
class Stop:
    """The run is over for this replica, after it has written its state, as it is, into the folder `checkpoint`."""

    reason: str
    checkpoint: str | None = None
    write_shared: bool = False  # write the shared state into it, too


@dataclass(frozen=True)
class Offer:
    """A state for joining members, taken at the end of `round`: references that the transport understands, to what all
    members have alike, and to what is this one's `own` (None: nothing, or another one offers it)."""

    member: int
    round: int
    state: Any
    own: Any = None
    digest: str = ""


@dataclass(frozen=True)
class Kept:
    """What was received in a round, for those that have missed it; `missed` without sources."""

    member: int
    missed: Missed
    reference: Any


@dataclass(frozen=True)
class Back:
    """A replica has all that it was given up to the end of `round`, the state that it was welcomed with or rounds that
    it had missed, and would take part. `fetched`: bytes of a state, by the member that gave them, in so many
    `seconds`."""

    member: int
    incarnation: int
    round: int
    fetched: dict[int, int]
    seconds: float = 0.0


@dataclass(frozen=True)
class CaughtUp:
    """A replica has followed the rounds that it had missed. `fetched` as in `Back`."""

    member: int
    rounds: int
    fetched: dict[int, int]


@dataclass(frozen=True)
class Evaluated:
    """Validation loss of the shared model after `round`, and what else its evaluation gave; None if this train loop has
    no way to tell."""

    member: int
    round: int
    val_loss: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """This member's files of the checkpoint of `round` are written: name -> (bytes, hash). `problem`: they are not.

    `positions` are its data positions now: with overlap, later than those of its arrival. `folder` is where they are.
    `steps`, `tokens` and `skipped` are what it has done since its last launch.
    """

    member: int
    round: int
    files: dict[str, tuple[int, str]]
    problem: str = ""
    positions: dict[int, int] = field(default_factory=dict)
    folder: str = ""
    steps: int = 0
    tokens: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Fired:
    """This entry of the fault schedule happens now; it must not happen again after a restart. `leaves`: so that the
    replica is to leave after its round."""

    member: int
    fault: int
    what: str = ""
    leaves: bool = False


@dataclass(frozen=True)
class Finished:
    """The train function has returned at nominal step `step`. `digest` is the final one of the shared state, `steps`
    are the inner steps since the last round, which nobody will share, and `skipped` further ones, not taken."""

    member: int
    digest: str | None
    step: int = 0
    steps: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Failed:
    """The train function raised: one line, and the whole traceback for a file."""

    member: int
    error: str
    traceback: str


@dataclass(frozen=True)
class Said:
    """Something that the user should know of this replica."""

    member: int
    text: str


@dataclass(frozen=True)
class Noted:
    """Answer to what needs no answer."""


Request = (
    Join
    | Arrival
    | Paused
    | Vote
    | Offer
    | Kept
    | Back
    | CaughtUp
    | Evaluated
    | Saved
    | Fired
    | Finished
    | Failed
    | Said
)
Answer = Welcome | Plan | Commit | Return | Reset | Stop | Noted
