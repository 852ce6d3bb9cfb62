"""A round from its arrivals to its commit: who exchanges with whom, and what becomes of the exchange."""

from ray_lowcomm.engine import absence, answers, closing, halt, overlap, rejections, strays
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.fleet_state import FleetState
from ray_lowcomm.engine.membership import AWAY, EXPECTED, Exchange, Member, MemberState, in_the_way, minority


def arrive(fleet: FleetState, arrival: m.Arrival) -> None:
    """A member has taken its inner steps, or cannot share them."""
    member = fleet.current(arrival.member, arrival.incarnation, MemberState.TRAINING)
    away = fleet.current(arrival.member, arrival.incarnation, MemberState.ABSENT)
    launches = member or away
    if launches is None:
        fleet.answer(arrival.member, fleet.dismissal("this replica was given up by the fleet"))
    elif member is not None and arrival.round != fleet.round:
        member.state = MemberState.OUT
        text = f"it stands at the end of round {arrival.round}, and the driver knows of round {fleet.round}"
        fleet.answer(arrival.member, fleet.dismissal(text))
    elif not arrival.healthy and not fleet.over:
        rejections.sit_out(fleet, launches, arrival)
    elif member is None:
        launches.arrival = arrival
        absence.come_back(fleet, launches)
    elif fleet.over:
        halt.send_home(fleet, member)
    else:
        member.arrival, member.state = arrival, MemberState.ARRIVED
        fleet.waits.arrived(fleet.now, steps_done=member.planned == fleet.steps_to_next())


def close_if_complete(fleet: FleetState) -> None:
    """Nobody is waited for any more: those that have arrived, and hold the same shared state, exchange."""
    arrived = fleet.in_state(MemberState.ARRIVED)
    if not arrived or fleet.exchange is not None or fleet.in_state(*EXPECTED):
        return
    fleet.waits.closed()
    digests = {x.index: x.arrival.digest for x in arrived if x.arrival and x.arrival.digest is not None}
    wrong = minority(digests) if digests else ()
    if wrong is None:
        same = "what loads weights must do so on all"
        fleet.fail(f"before round {fleet.round + 1} replicas hold different shared state: {digests} ({same})")
        return
    fleet.book.totals.replicas_different += len(wrong)
    for index in wrong:
        fleet.notice(f"replica {index} holds other shared state than the majority: it is reset")
        fleet.members[index].state = MemberState.OUT
        fleet.answer(index, m.Reset("its shared state differed from the majority's", shared=False))
    _send_plan(fleet, [x for x in arrived if x.index not in wrong])


def _send_plan(fleet: FleetState, members: list[Member]) -> None:
    members = sorted(members, key=lambda member: member.index)
    indices = tuple(member.index for member in members)
    arrivals = tuple(member.arrival for member in members if member.arrival is not None)
    different = answers.different_messages(arrivals)
    if different:
        fleet.fail(f"round {fleet.round + 1}: replicas came with different messages: {different}")
        return
    if indices != fleet.group:
        fleet.where.generation += 1
    fleet.exchange = Exchange(fleet.where.generation, indices, arrivals, fleet.now)
    plan = answers.exchange_plan(fleet.exchange, fleet.where, fleet.plan.fleet.deadline_s)
    for member in members:
        member.state, member.vote = MemberState.EXCHANGING, None
        fleet.answer(member.index, plan)


def vote(fleet: FleetState, vote: m.Vote) -> None:
    """A member has received all of an exchange, or has not."""
    member, exchange = fleet.current(vote.member, vote.incarnation, MemberState.EXCHANGING), fleet.exchange
    away = fleet.current(vote.member, vote.incarnation, MemberState.ABSENT)
    known = fleet.current(vote.member, vote.incarnation, MemberState.TRAINING)
    if away is not None:
        fleet.book.add_vote(vote)
        absence.come_back(fleet, away)
    elif known is not None and vote.arrival is not None:  # of an exchange that has died with a driver
        fleet.book.add_vote(vote)
        arrive(fleet, vote.arrival)
    elif member is None or exchange is None or exchange.generation != vote.generation:
        fleet.answer(vote.member, fleet.dismissal("its exchange is over"))
    else:
        member.vote = vote
        fleet.book.add_vote(vote)
        exchange.broken = exchange.broken or not vote.ok


def tally_if_complete(fleet: FleetState) -> None:
    """All that are alive have voted: commit, or exchange again."""
    exchange = fleet.exchange
    if exchange is None:
        return
    alive = [x for x in map(fleet.members.__getitem__, exchange.members) if x.state is MemberState.EXCHANGING]
    votes = [x.vote for x in alive if x.vote is not None]
    if len(votes) < len(alive):
        return
    fleet.exchange = None
    if not alive:
        fleet.group, fleet.retries = (), 0
    elif all(v.ok for v in votes) and len({v.digest for v in votes}) == 1:
        _commit(fleet, exchange, alive, votes)
    else:
        fleet.book.totals.lost_inner_steps += exchange.owed
        _retry(fleet, _without_slow(fleet, exchange, alive), votes)


def _without_slow(fleet: FleetState, exchange: Exchange, alive: list[Member]) -> list[Member]:
    """Who tries again after an exchange that has failed: where it took too long, not those that were waited for."""
    if not fleet.plan.catches_up or fleet.now - exchange.started < fleet.plan.fleet.deadline_s:
        return alive
    there = {member.index for member in alive}
    slow = in_the_way({by: whom for by, whom in exchange.waits_for.items() if {by, whom} <= there})
    for member in alive:
        if member.index in slow:
            absence.miss_slow(fleet, member, fleet.now - exchange.started)
            absence.come_back(fleet, member)
    return [member for member in alive if member.index not in slow]


def _retry(fleet: FleetState, alive: list[Member], votes: list[m.Vote]) -> None:
    fleet.group = ()
    fleet.retries += 1
    fleet.book.totals.rounds_retried += 1
    fleet.book.count_failed(votes)
    problems = "; ".join(f"replica {v.member}: {v.problem}" for v in votes if not v.ok)
    problems = problems or "digests of what was received differ"
    number = fleet.round + 1
    if halt.instead_of_retry(fleet, alive):
        return
    if fleet.retries > fleet.plan.fleet.max_retries:
        fleet.fail(f"round {number} failed {fleet.retries} times (fleet.max_retries): {problems}")
        return
    fleet.notice(f"round {number}: exchange failed ({problems}); attempt {fleet.retries + 1} with the same messages")
    _send_plan(fleet, alive)


def _commit(fleet: FleetState, exchange: Exchange, alive: list[Member], votes: list[m.Vote]) -> None:
    arrivals, where = list(exchange.arrivals), fleet.where
    ops = fleet.agreement.next_ops(where.launched, where.overlap)
    where.round += 1
    where.launched, where.step, where.history = ops[0].launch, max(op.apply for op in ops), votes[0].digest
    whole = len(alive) == len(exchange.members) and not strays.too_many(fleet, votes)
    fleet.group = exchange.members if whole else ()
    record = fleet.book.commit(where, arrivals, votes, fleet.retries)
    if len(arrivals) > 1:
        fleet.book.totals.dense_bytes += fleet.agreement.dense_bytes(ops)
    farther = where.round > fleet.farthest  # a round that is only repeated shows no progress
    for arrival in arrivals:
        if farther:
            fleet.failures[arrival.member] = 0
        fleet.seconds_per_step[arrival.member] = overlap.seconds_per_step(arrival)
        fleet.members[arrival.member].held_back = arrival.residual_norm or 0.0
    took_s = fleet.now - exchange.started
    if (now := overlap.measured(arrivals, votes)) is not None:
        fleet.measured = [*fleet.measured, now][-overlap.ROUNDS :]
    absence.exchanged(fleet, exchange, took_s)
    rejections.committed(fleet, arrivals, farther)
    for member in fleet.in_state(*AWAY):
        if member.index in exchange.members:  # what it had sent was counted, though it does not know yet
            member.arrival, member.planned = None, 0
    fleet.farthest = max(fleet.farthest, where.round)
    fleet.waits.steps_from = exchange.started if where.late else fleet.now
    fleet.retries = 0
    closing.give_duties(fleet, alive, record)
