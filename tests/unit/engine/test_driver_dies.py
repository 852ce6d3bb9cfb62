"""The driver dies at any point and is started again: replicas ask again what they had asked, and everything counts
once."""

import pytest

from ray_lowcomm.core.settings import CheckpointSettings, RunSettings
from ray_lowcomm.engine import messages as m

from .desk import SIZE, Desk, H
from .test_any_order import EXCUSES, ROUNDS, Play, Player


class Counting(Player):
    """Takes the steps that it is told to, and knows which of them it has not shared."""

    def __init__(self, index):
        self.taken = self.work = self.flight = 0
        super().__init__(index)

    def start(self):
        self.work = self.flight = 0
        super().start()

    def arrival(self):
        self.flight, self.work = self.work, 0
        made = super().arrival()
        self.sent = m.Arrival(**(vars(made) | {"steps": self.flight, "tokens": self.flight}))
        return self.sent

    def hear(self, answer, luck):
        if isinstance(answer, m.Commit):
            self.flight = 0
        elif isinstance(answer, m.Return | m.Reset):
            self.work, self.flight = self.work + self.flight, 0
        if isinstance(answer, m.Welcome | m.Commit | m.Return) and not getattr(answer, "again", False):
            self.work += answer.inner_steps
            self.taken += answer.inner_steps
        if isinstance(answer, m.Welcome) and answer.evaluate:
            raise AssertionError("nobody is asked to")
        super().hear(answer, luck)
        if isinstance(answer, m.Commit) and answer.evaluate:
            self.next.insert(0, m.Evaluated(self.index, answer.round, 1.0))
        if isinstance(answer, m.Reset):
            reason = answer.reason
            self.next = [m.Join(self.index, "as built", {"model.dense_bytes": str(SIZE)}, (), (), self.work, 0, reason)]
            self.work = 0


class Dying(Play):
    """Kills the driver so many times, at moments of its own: before what it does is written down, or before all have
    heard of it."""

    def __init__(self, desk, seed, deaths):
        super().__init__(desk, seed)
        self.players = [Counting(index) for index in desk.answers]
        self.driver_deaths, self.seen = deaths, 0
        self.journal = desk.journal()

    def hear(self):
        dies = self.driver_deaths and self.luck.random() < 0.03
        answers = [answer for given in self.desk.answers.values() for answer in given]
        if dies and self.luck.random() < 0.5:
            del self.desk.events[self.seen :]  # nobody has seen them
            return self.restart()
        if len(self.desk.events) > self.seen or not all(isinstance(answer, m.Plan) for answer in answers):
            self.journal, self.seen = self.desk.journal(), len(self.desk.events)
        for player in self.players:
            if player.next and player.next[0] is player.asked:  # it has not asked this driver yet
                self.desk.answers[player.index].clear()
        if not dies:
            return super().hear()
        for player in self.players:  # some have their answers, some do not
            if self.luck.random() < 0.5:
                self.desk.answers[player.index].clear()
        super().hear()
        return self.restart()

    def restart(self):
        self.driver_deaths -= 1
        self.desk.restart(self.journal)
        self.journal = self.desk.journal()  # before it answers anybody
        for player in self.players:
            if player.waits:
                player.waits = False
                player.next.insert(0, player.asked)


def played(seed, replicas=3, overlap=0, driver_deaths=6, every=2, **accidents):
    patience = {"max_failures": 99, "max_retries": 99, "grace_s": 5, "start_s": 50}
    checkpoint, run = CheckpointSettings(every=every), RunSettings(eval_every=0)
    strategy = {"overlap_steps": overlap}
    desk = Desk(replicas, strategy=strategy, total=H * ROUNDS, checkpoint=checkpoint, run=run, **patience)
    play = Dying(desk, seed, driver_deaths)
    play.go(**accidents)
    return play


@pytest.mark.parametrize("overlap", [0, H])
def test_nothing_is_lost_and_nothing_counts_twice(overlap):
    for seed in range(25):
        play = played(seed, overlap=overlap)
        desk, summary = play.desk, play.desk.summary
        assert desk.coordinator.ended, (seed, desk.failure)
        assert summary["driver_restarts"] == 6 - play.driver_deaths
        assert [record["round"] for record in desk.said("record")] == list(range(1, ROUNDS + 1)), seed
        assert all(record["members"] == [0, 1, 2] for record in desk.said("record")), seed
        taken = sum(player.taken for player in play.players)
        assert (summary["inner_steps"], summary["tokens"], summary["lost_inner_steps"]) == (taken, taken, 0), seed
        assert taken == 3 * H * ROUNDS
        manifests = [manifest["round"] for _, manifest in desk.said("manifest")]
        assert manifests[-1] == ROUNDS
        assert len(set(manifests)) == len(manifests)


@pytest.mark.parametrize("overlap", [0, 3, H, "auto"])
@pytest.mark.parametrize("replicas", [3, [1, 4]])
@pytest.mark.parametrize("stop", [False, True])
def test_it_comes_to_an_end_whatever_else_happens(replicas, overlap, stop):
    for seed in range(10):
        others = {"deaths": seed % 4, "leavers": 0 if replicas == 3 else seed % 3, "naps": seed % 5, "slow": seed % 3}
        play = played(seed, replicas, overlap, 3, stop=stop, **others)
        coordinator = play.desk.coordinator
        assert coordinator.ended or coordinator.failure.startswith(EXCUSES), (seed, coordinator.failure)
