"""What a replica makes of what was received: in a round of its own, in rounds that it has missed, and for others that
have missed one."""

from collections.abc import Sequence
from dataclasses import dataclass

from ray_lowcomm.core.errors import PayloadError
from ray_lowcomm.core.optimizer_saving import OptimizerState
from ray_lowcomm.core.tracks import PARAMS
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.catching_up import Behind, PastRound, to_keep
from ray_lowcomm.engine.offer_names import round_offer
from ray_lowcomm.engine.round import Held, Parties, Results, Round
from ray_lowcomm.engine.skipping import Skipping
from ray_lowcomm.engine.together import Together


@dataclass(frozen=True)
class Reception:
    """One replica's. With `reset` the inner optimizer begins anew after each sync of the parameters.

    What is whole on all shards of the replica is made equal on them afterwards.
    """

    parties: Parties
    skipping: Skipping
    optimizer: OptimizerState
    member: int
    reset: bool
    together: Together

    def take_over(self, held: Held) -> None:
        """Apply a committed round, once those that have missed it can have it, too: to apply may write over it."""
        if held.commit.keep:
            self._keep(held)
        self._apply(held.results)
        self.parties.transport.withdraw(held.commit.wanted)

    def follow(self, rounds: Sequence[PastRound]) -> None:
        """Take over rounds that this replica has had no part in.

        Raises:
            PayloadError: what others have received cannot be read here.
        """

        def follow() -> None:
            for past in rounds:
                for op, received in past.received():
                    self.parties.owner(op).follow(op, received)

        self.together.all_well("missed rounds", follow, PayloadError)
        self.together.spread()
        self.skipping.keep()

    def catch_up(self, flight: Round, behind: Behind) -> None:
        """Take over the rounds that went on without this replica, whose `flight` was in the air. PayloadError as
        `follow`."""
        rounds = behind.rounds
        if behind.counted:  # the fleet had gone on before this replica knew
            self._apply(flight.results_of(rounds[0]))
            rounds = rounds[1:]
        self.follow(rounds)

    def _apply(self, results: Results) -> None:
        for op, proposal, received in results:
            self.parties.owner(op).apply(proposal, received)
        if any(op.point == "after_backward" for op, _, _ in results):
            self.together.spread_gradients()
        else:
            self.together.spread()
        self.skipping.keep()
        if self.reset and any(op.track == PARAMS for op, _, _ in results):
            self.optimizer.reset()

    def _keep(self, held: Held) -> None:
        first, number = held.results[0][2], held.commit.round
        parts = [received.parts for _, _, received in held.results]
        reference = self.parties.transport.offer(round_offer(number), to_keep(parts))
        ops = tuple(op for op, _, _ in held.results)
        missed = m.Missed(number, ops, first.members, first.weights, held.history)
        self.parties.channel.request(m.Kept(self.member, missed, reference))
