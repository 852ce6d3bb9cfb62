"""Replicas that launch, vote, save, die, come back, leave and are stopped in any order: nobody waits for ever."""

import random
from dataclasses import replace

import pytest

from ray_lowcomm.core.settings import CheckpointSettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.membership import PRESENT

from .desk import SIZE, Desk, H

ROUNDS = 8
# where the member that writes what is shared dies at the end, the run cannot have ended as it should
EXCUSES = ("who was to write the final model and the shared state died before they were whole",)


class Player:
    """One replica as the driver sees it: what it would ask next, and whether it waits for an answer."""

    def __init__(self, index):
        self.index, self.over, self.keeps, self.starts = index, False, [], 0
        self.start()

    def start(self):
        """A new process."""
        self.waits, self.incarnation, self.round, self.sleeps, self.slow = False, 0, 0, False, False
        self.asked, self.number = None, 0
        self.starts += 1
        self.members = ()
        self.next = [m.Join(self.index, "as built", {"model.dense_bytes": str(SIZE)})]

    def arrival(self):
        sizes = (m.PayloadSize(f"params@{self.round}", "mean", SIZE),)
        positions = {self.index: 8}
        self.sent = m.Arrival(self.index, self.incarnation, self.round, True, H, 8, 1.0, 1.0, sizes, "same", positions)
        return self.sent

    def hear(self, answer, luck):
        """Take an answer; requests that follow are made in this order, each when its turn comes."""
        self.waits = False
        if isinstance(answer, m.Noted):
            return
        if isinstance(answer, m.Plan):
            ok, digest, self.members = luck.random() > 0.15, f"round {answer.round}", answer.members
            vote = m.Vote(self.index, self.incarnation, answer.generation, ok, digest, exchange_s=luck.random())
            self.next = [replace(vote, arrival=self.sent)]
        elif isinstance(answer, m.Reset):
            self.next = [m.Join(self.index, "as built", {"model.dense_bytes": str(SIZE)}, reason=answer.reason)]
        elif isinstance(answer, m.Stop):
            self._end(answer.checkpoint, answer.write_shared)
        elif isinstance(answer, m.Welcome):
            self.incarnation, self.round = answer.incarnation, answer.round
            if answer.state is not None:
                self.next = [m.Back(self.index, self.incarnation, self.round, dict.fromkeys(answer.state.sources, 1))]
            else:
                self._go_on(answer.serve, answer.launch is not None)
        elif isinstance(answer, m.Return):
            numbers = [missed.round for missed in answer.missed]
            assert numbers == list(range(self.round + 1, answer.round + 1)), (self.round, answer)
            self.round = answer.round
            if answer.again:
                self.next = [m.Back(self.index, self.incarnation, self.round, {})]
                return
            self.next = [m.CaughtUp(self.index, len(numbers), {})] if numbers else []
            self.next += [self.arrival() if answer.launch is not None else m.Finished(self.index, "same")]
        else:
            self.round = answer.round
            self.keeps = [self.kept()] if answer.keep else []
            if answer.inner_steps:
                self._go_on(answer.serve, True, answer.checkpoint, answer.write_shared)
            else:
                self._end(answer.checkpoint, answer.write_shared)

    def kept(self):
        return m.Kept(self.index, m.Missed(self.round, (), (0,), (1.0,), "history"), "round")

    def _go_on(self, serve, launches, checkpoint=None, shared=False):
        keeps, self.keeps = self.keeps, []
        self.next = keeps + ([m.Offer(self.index, self.round, "state")] if serve else [])
        self.next += self._saved(checkpoint, shared)
        self.next += [self.arrival() if launches else m.Finished(self.index, "same")]

    def _end(self, checkpoint, shared):
        self.next = [*self._saved(checkpoint, shared), m.Finished(self.index, "same")]

    def _saved(self, folder, shared):
        files = {"shared.safetensors": (1, "a")} if shared else {}
        return [m.Saved(self.index, self.round, files, "", {self.index: 8}, folder)] if folder else []


class Play:
    """Lets one player after another go on, in an order of its own for each seed."""

    def __init__(self, desk, seed):
        self.desk, self.luck = desk, random.Random(seed)
        self.players = [Player(index) for index in desk.answers]
        self.dealt = {}  # round -> what its commits have said

    def go(self, deaths=0, leavers=0, stop=False, naps=0, slow=0):
        """Play until nobody has anything to say any more, with so many accidents on the way."""
        accidents = [self.die] * deaths + [self.leave] * leavers + [self.stop] * stop + [self.nap] * naps
        accidents += [self.slow_down] * slow
        self.luck.shuffle(accidents)
        for _ in range(3000):
            if accidents and self.luck.random() < 0.02:
                accidents.pop()()
            for player in self.players:
                if player.sleeps and self.luck.random() < 0.03:
                    self.wake(player)
                player.slow = player.slow and self.luck.random() > 0.03
            able = [player for player in self.players if player.next and not player.waits and not player.sleeps]
            able = [player for player in able if not self.held_up(player)]
            if able:
                self.say(self.luck.choice(able))
            elif all(player.over for player in self.players):
                return
            else:
                self.desk.wait(1)
                states = {i: x.state for i, x in self.desk.coordinator.members.items()}
                assert self.desk.now < 400, ([(p.index, p.waits, p.sleeps, p.next) for p in self.players], states)
            self.hear()
        raise AssertionError("the run does not come to an end")

    def say(self, player):
        request = player.next.pop(0)
        first = request is not player.asked
        if first and isinstance(request, m.Arrival) and self.desk.coordinator.stopping and self.luck.random() < 0.5:
            request = m.Paused(player.index, player.incarnation, player.round)
        if request is not player.asked:  # else it is asked again
            player.asked, player.number = request, player.number + 1
        player.waits = True
        player.over = isinstance(request, m.Finished)
        self.desk.send(request, f"{player.index}, {player.starts}", player.number)

    def hear(self):
        for player in self.players:
            if player.sleeps:
                continue
            for answer in self.desk.answers[player.index]:
                assert player.waits, answer  # no answer without a question
                if isinstance(answer, m.Commit):
                    said = self.dealt.setdefault(answer.round, (answer.dealt, answer.overlap))
                    assert said == (answer.dealt, answer.overlap)
                player.hear(answer, self.luck)
            self.desk.answers[player.index].clear()

    def die(self):
        player = self.luck.choice(self.players)
        member = self.desk.coordinator.members.get(player.index)
        if member is not None and member.state in PRESENT and not player.over:
            self.desk.lose(player.index)
            self.desk.answers[player.index].clear()
            player.start()

    def nap(self):
        """A process that does not answer for a while; what it is answered it reads when it goes on."""
        player = self.luck.choice(self.players)
        if player.index in self.desk.coordinator.members and not player.over and not player.sleeps:
            player.sleeps = True
            self.desk.hush(player.index)

    def slow_down(self):
        """The link of one is slow for a while."""
        self.luck.choice(self.players).slow = True

    def held_up(self, player):
        """Whether this one's exchange goes on because of a slow one; the driver is told so, and may break it off."""
        vote = player.next[0]
        slow = [other.index for other in self.players if other.slow and other.index in player.members]
        if not isinstance(vote, m.Vote) or not slow:
            return False
        others = [index for index in player.members if index != player.index]
        whom = self.luck.choice([index for index in slow if index != player.index] or others or [None])
        report = None if whom is None else (player.index, whom)
        if self.desk.coordinator.exchange_is_on(vote.generation, report):
            return whom is not None
        player.next[0] = replace(vote, ok=False)
        return False

    def wake(self, player):
        player.sleeps = False
        self.desk.wake(player.index)

    def leave(self):
        self.desk.coordinator.leave(self.luck.choice(self.players).index, "its node is drained", self.desk.now)
        self.desk.collect()

    def stop(self):
        self.desk.coordinator.stop("Ctrl-C", save=True)
        self.desk.collect()


@pytest.mark.parametrize("overlap", [0, 3, H, "auto"])
@pytest.mark.parametrize("replicas", [3, [1, 4]])
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("naps", [0, 4])
@pytest.mark.parametrize("slow", [0, 6])
def test_whatever_happens_the_run_comes_to_an_end(replicas, overlap, stop, naps, slow):
    for seed in range(20):
        patience = {"max_failures": 99, "max_retries": 99, "grace_s": 5, "start_s": 50}
        strategy, checkpoint = {"overlap_steps": overlap}, CheckpointSettings(every=2)
        desk = Desk(replicas, strategy=strategy, total=H * ROUNDS, checkpoint=checkpoint, **patience)
        play = Play(desk, seed)
        play.go(deaths=seed % 4, leavers=0 if replicas == 3 else seed % 3, stop=stop, naps=naps, slow=slow)
        coordinator = desk.coordinator
        assert coordinator.ended or coordinator.failure.startswith(EXCUSES), (seed, coordinator.failure)
        late = {record["round"]: record["overlap_steps"] for record in desk.said("record")}
        assert all(late[number] == 0 for number, (dealt, _) in play.dealt.items() if dealt)
