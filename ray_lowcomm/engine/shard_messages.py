"""What the shards of a replica say together, as one message of the replica; and what an answer to it says to each."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.remarks import added_up
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.reported import over_shards
from ray_lowcomm.engine.totals import root_of_squares

ALONE = (m.Fired, m.Said, m.Failed)  # are those of one shard, and not merged
BETWEEN, OF = "/", "|"  # parts of a digest; an op's id and the shard whose message it is
DENSE_BYTES = "model.dense_bytes"


def merged(requests: Sequence[m.Request]) -> m.Request:
    """The request of a replica, of those of its shards, in their order.

    Digests of all are joined, sizes, bytes and tokens are those of all together, the user's own numbers are means over
    the shards that have them, it is healthy if all are; what the engine makes equal on all shards is the first one's.

    Raises:
        FleetError: they are not of one type.
    """
    if len(requests) == 1:
        return requests[0]
    kinds = {type(request) for request in requests}
    if len(kinds) > 1 or not kinds <= _MERGES.keys():
        raise FleetError(f"shards of a replica asked for {sorted(k.__name__ for k in kinds)} where one thing is asked")
    result: m.Request = _MERGES[kinds.pop()](requests)
    return result


def parted(answer: m.Answer, shard: int, shards: int) -> m.Answer:
    """What an answer to a merged request says to one shard."""
    if shards == 1:
        return answer
    if isinstance(answer, m.Welcome):
        state = None if answer.state is None else _offered(answer.state, shard, shards)
        return replace(answer, state=state, history=_part(answer.history, shard, shards))
    if isinstance(answer, m.Return):
        missed = tuple(_missed(one, shard, shards) for one in answer.missed)
        return replace(answer, missed=missed, history=_part(answer.history, shard, shards))
    if isinstance(answer, m.Plan):
        own = f"{OF}{shard}"
        sizes = {op.removesuffix(own): each for op, each in answer.sizes.items() if op.endswith(own)}
        return replace(answer, sizes=sizes)
    return answer


def of_shard(shard: int, text: str) -> str:
    """A text for the user, with the shard that says it."""
    return f"shard {shard}: {text}"


# ---- requests --------------------------------------------------------------------------------------------------------


def _join(requests: Sequence[m.Join]) -> m.Join:
    return replace(
        requests[0],
        digest=_joined([one.digest for one in requests]),
        holds=_joined_or_none([one.holds for one in requests]),
        config=_config([one.config for one in requests]),
        moments=_once(name for one in requests for name in one.moments),
        remarks=added_up(remark for one in requests for remark in one.remarks),
        reason=first_said([one.reason for one in requests]),
    )


def _arrival(requests: Sequence[m.Arrival]) -> m.Arrival:
    return replace(
        requests[0],
        healthy=all(one.healthy for one in requests),
        problem=first_said([one.problem for one in requests]),
        tokens=sum(one.tokens for one in requests),
        sizes=tuple(
            replace(size, op=f"{size.op}{OF}{shard}") for shard, one in enumerate(requests) for size in one.sizes
        ),
        digest=_joined_or_none([one.digest for one in requests]),
        residual_norm=root_of_squares([one.residual_norm for one in requests]),
        metrics=over_shards([one.metrics for one in requests]),
        positions=_all_positions(requests),
    )


def _vote(requests: Sequence[m.Vote]) -> m.Vote:
    arrivals = [one.arrival for one in requests if one.arrival is not None]
    return replace(
        requests[0],
        ok=all(one.ok for one in requests),
        digest=_joined([one.digest for one in requests]),
        problem=first_said([one.problem for one in requests]),
        bytes=_summed([one.bytes for one in requests]),
        residual_lost=sum(one.residual_lost for one in requests),
        arrival=_arrival(arrivals) if len(arrivals) == len(requests) else None,
        **{name: max(getattr(one, name) for one in requests) for name in _LARGEST},
    )


_LARGEST = ("exchange_s", "wait_s", "outer_s", "blocked_s", "beside_s", "strays")


def _offer(requests: Sequence[m.Offer]) -> m.Offer:
    own = tuple(one.own for one in requests)
    return replace(
        requests[0],
        state=tuple(one.state for one in requests),
        own=None if all(one is None for one in own) else own,
        digest=_joined([one.digest for one in requests]),
    )


def _kept(requests: Sequence[m.Kept]) -> m.Kept:
    history = _joined([one.missed.history for one in requests])
    references = tuple(one.reference for one in requests)
    return replace(requests[0], missed=replace(requests[0].missed, history=history), reference=references)


def _back(requests: Sequence[m.Back]) -> m.Back:
    seconds = max(one.seconds for one in requests)
    return replace(requests[0], fetched=_summed([one.fetched for one in requests]), seconds=seconds)


def _caught_up(requests: Sequence[m.CaughtUp]) -> m.CaughtUp:
    return replace(requests[0], fetched=_summed([one.fetched for one in requests]))


def _evaluated(requests: Sequence[m.Evaluated]) -> m.Evaluated:
    losses = [{} if one.val_loss is None else {"loss": one.val_loss} for one in requests]
    metrics = over_shards([one.metrics for one in requests])
    return replace(requests[0], val_loss=over_shards(losses).get("loss"), metrics=metrics)


def _saved(requests: Sequence[m.Saved]) -> m.Saved:
    problems = [of_shard(shard, one.problem) for shard, one in enumerate(requests) if one.problem]
    files = {name: written for one in requests for name, written in one.files.items()}
    return replace(
        requests[0],
        files=files,
        problem="; ".join(problems),
        tokens=sum(one.tokens for one in requests),
        positions=_all_positions(requests),
    )


def _finished(requests: Sequence[m.Finished]) -> m.Finished:
    return replace(requests[0], digest=_joined_or_none([one.digest for one in requests]))


def _leaders(requests: Sequence[m.Request]) -> m.Request:
    return requests[0]


_MERGES: dict[type, Callable[[Any], Any]] = {
    m.Join: _join,
    m.Arrival: _arrival,
    m.Paused: _leaders,
    m.Vote: _vote,
    m.Offer: _offer,
    m.Kept: _kept,
    m.Back: _back,
    m.CaughtUp: _caught_up,
    m.Evaluated: _evaluated,
    m.Saved: _saved,
    m.Finished: _finished,
}


# ---- answers ---------------------------------------------------------------------------------------------------------


def _offered(offered: m.Offered, shard: int, shards: int) -> m.Offered:
    own = offered.own
    if own is not None:
        member, references = own
        reference = _reference(references, shard, shards)
        own = None if reference is None else (member, reference)
    digest = _part(offered.digest, shard, shards)
    return m.Offered(_of_each(offered.sources, shard, shards), own, digest)


def _missed(missed: m.Missed, shard: int, shards: int) -> m.Missed:
    history = _part(missed.history, shard, shards)
    return replace(missed, history=history, sources=_of_each(missed.sources, shard, shards))


def _of_each(sources: dict[int, Any], shard: int, shards: int) -> dict[int, Any]:
    return {member: _reference(references, shard, shards) for member, references in sources.items()}


def _reference(references: Any, shard: int, shards: int) -> Any:
    """The shard's, of those of another replica's shards."""
    if not isinstance(references, tuple) or len(references) != shards:
        there = len(references) if isinstance(references, tuple) else 1
        raise FleetError(f"a replica of {shards} shards was offered the state of one of {there}: all must have as many")
    return references[shard]


# ---- values ----------------------------------------------------------------------------------------------------------


def _joined(texts: Sequence[str]) -> str:
    """One where all are equal, so that what goes whole to every shard comes back as it was."""
    return texts[0] if len(set(texts)) == 1 else BETWEEN.join(texts)


def _joined_or_none(texts: Sequence[str | None]) -> str | None:
    return None if any(text is None for text in texts) else _joined(cast(Sequence[str], texts))


def _part(text: str, shard: int, shards: int) -> str:
    """The shard's; a text that has not so many parts, as of a run resumed with other shards, is everybody's."""
    parts = text.split(BETWEEN)
    return parts[shard] if len(parts) == shards else text


def _all_positions(requests: Sequence[m.Arrival | m.Saved]) -> dict[int, int]:
    """In the data, of all shards: each may have a part of its own. Of one that several have, the first one's."""
    return {shard: position for one in reversed(requests) for shard, position in one.positions.items()}


def _config(configs: Sequence[dict[str, str]]) -> dict[str, str]:
    names = _once(name for config in configs for name in config)
    return {name: _setting(name, [config.get(name, "") for config in configs]) for name in names}


def _setting(name: str, values: Sequence[str]) -> str:
    if name != DENSE_BYTES:
        return _joined(values)
    counts = [[int(count) for count in value.split(",")] for value in values if value]
    places = range(max(map(len, counts), default=0))
    return ",".join(str(sum(each[k] for each in counts if k < len(each))) for k in places)


def first_said(problems: Sequence[str]) -> str:
    """What is wrong with a replica, where this is what is wrong with its shards ('': nothing): the first problem, with
    its shard; what all say alike is the replica's."""
    if len(set(problems)) == 1:
        return problems[0]
    return next(of_shard(shard, problem) for shard, problem in enumerate(problems) if problem)


def _summed(counts: Sequence[dict[Any, int]]) -> dict[Any, int]:
    total: Counter[Any] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def _once(values: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))
