"""A replica that has missed rounds fetches what others received in them, and follows: with its own work kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ray_lowcomm.core.digest import digest_tensors, digest_text
from ray_lowcomm.core.errors import ExchangeError
from ray_lowcomm.core.payload import Received
from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.inside import Inside
from ray_lowcomm.engine.transport import Channel, Transport


@dataclass(frozen=True)
class Lines:
    """Of a replica, or of one of its shards: to the others of its kind, to the driver, and to the other shards."""

    transport: Transport
    channel: Channel
    inside: Inside


@dataclass(frozen=True)
class PastRound:
    """A committed round: its ops, who took part with which weight, and for each op what was received."""

    ops: tuple[SyncOp, ...]
    members: tuple[int, ...]
    weights: tuple[float, ...]
    parts: tuple[tuple[Tensor, ...], ...]

    def received(self) -> list[tuple[SyncOp, Received]]:
        """By op, for one that had no part in it."""
        return [
            (op, Received(self.members, self.weights, part, included=False))
            for op, part in zip(self.ops, self.parts, strict=True)
        ]


@dataclass(frozen=True)
class Behind:
    """Rounds that a replica has missed, as others have received them: to be followed, the first one applied where its
    own message was `counted` in it. `nbytes` by the member that gave them."""

    answer: m.Return
    rounds: tuple[PastRound, ...]
    nbytes: dict[int, int]
    counted: bool = False


def history_with(
    history: str,
    number: int,
    members: tuple[int, ...],
    weights: tuple[float, ...],
    parts: Sequence[tuple[Tensor, ...]],
) -> str:
    """Digest of the committed history with round `number`: covers what was before, who took part with which weight, and
    all that was received."""
    content = digest_tensors(tensor for part in parts for tensor in part)
    return digest_text(f"{history}/{number - 1}/{members}/{weights}/{content}")


def to_keep(parts: Sequence[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """What was received in a round, as named tensors."""
    return {f"{i}/{k}": tensor for i, part in enumerate(parts) for k, tensor in enumerate(part)}


def fetch_missed(lines: Lines, back: m.Back, history: str, answer: m.Answer) -> Behind | m.Answer:
    """All that was missed by a replica that stands at `history`, by the driver's answer and those to further questions
    (each is `back`); or what the driver has said that is no `Return`.

    Raises:
        ExchangeError: something cannot be had, or is not what the others have committed.
    """
    rounds, nbytes = [], dict[int, int]()
    while isinstance(answer, m.Return):
        problem = ""
        try:
            rounds += _fetched(lines.transport, history, answer, nbytes)
        except ExchangeError as error:
            problem = str(error)
        # or one shard of a replica would begin anew while the others go on
        if problem := lines.inside.agree(f"missed up to {answer.round}", problem):
            raise ExchangeError(problem)
        history = answer.history
        if not answer.again:
            return Behind(answer, tuple(rounds), nbytes)
        answer = lines.channel.request(replace(back, round=answer.round))
    return answer


def _fetched(transport: Transport, history: str, answer: m.Return, nbytes: dict[int, int]) -> list[PastRound]:
    rounds = []
    for missed in answer.missed:
        fetched = transport.fetch(missed.sources)
        parts = _parts(fetched.state, len(missed.ops))
        history = history_with(history, missed.round, missed.members, missed.weights, parts)
        if history != missed.history:
            raise ExchangeError(f"round {missed.round} is not what its members have committed")
        rounds.append(PastRound(missed.ops, missed.members, missed.weights, parts))
        for member, amount in fetched.nbytes.items():
            nbytes[member] = nbytes.get(member, 0) + amount
    if history != answer.history:
        raise ExchangeError(f"what was kept does not lead to round {answer.round}")
    return rounds


def _parts(state: Mapping[str, Tensor], count: int) -> tuple[tuple[Tensor, ...], ...]:
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    for name in sorted(state, key=lambda name: tuple(map(int, name.split("/")))):
        parts[int(name.partition("/")[0])].append(state[name])
    return tuple(map(tuple, parts))
