"""The coordinator's longer answers, put together from what it knows. No decisions."""

from collections.abc import Sequence

from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import Position
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import Exchange, Member, weights_of


def welcome(fleet: FleetState, member: Member, keep: bool) -> m.Welcome:
    """A member's start: with `keep` from the shared state it holds, else from a state that it is to load, from the
    plan's checkpoint, or with what it has."""
    where, plan, book = fleet.where, fleet.plan, fleet.book
    restores = member.loads is None and not keep and plan.restore is not None
    return m.Welcome(
        incarnation=member.incarnation,
        round=where.round,
        step=where.step,
        inner_steps=member.planned,
        launch=fleet.agreement.next_launch(where.launched),
        overlap=where.overlap,
        beside=member.beside,
        positions=dict(book.data_positions),
        dealt=fleet.dealt,
        restore=plan.restore if restores else None,
        manifest=plan.restored if restores else None,
        history=where.history,
        fired=tuple(sorted(book.fired)),
        keep=keep,
    )


def to_return(fleet: FleetState, member: Member, missed: tuple[m.Missed, ...], again: bool) -> m.Return:
    """How a member that was away comes back, or what it has to fetch before it asks `again`."""
    where, anew = fleet.where, member.knows != fleet.dealt
    return m.Return(
        missed=missed,
        round=where.round,
        step=where.step,
        inner_steps=member.planned,
        launch=fleet.agreement.next_launch(where.launched),
        overlap=where.overlap,
        beside=member.beside,
        history=where.history,
        dealt=fleet.dealt if anew else (),
        positions=dict(fleet.book.data_positions) if anew else {},
        again=again,
    )


def exchange_plan(exchange: Exchange, where: Position, deadline_s: float) -> m.Plan:
    """The plan that all members of an exchange get."""
    arrivals = list(exchange.arrivals)
    sizes = {s.op: tuple(a.sizes[k].nbytes for a in arrivals) for k, s in enumerate(arrivals[0].sizes)}
    return m.Plan(
        generation=exchange.generation,
        round=where.round,
        members=exchange.members,
        weights=weights_of(arrivals),
        sizes=sizes,
        deadline_s=deadline_s,
    )


def different_messages(arrivals: Sequence[m.Arrival]) -> str:
    """Who came with which messages, if not all with the same; else ''."""
    came = {a.member: [(s.op, s.combine) for s in a.sizes] for a in arrivals}
    return "" if all(ops == came[arrivals[0].member] for ops in came.values()) else str(came)
