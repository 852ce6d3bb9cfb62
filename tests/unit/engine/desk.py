"""A coordinator with a clock of its own, spoken to as replicas would: one method a request."""

from ray_lowcomm import strategies
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.coordinator import Coordinator
from ray_lowcomm.runtime.journal_file import HostState, decoded, encoded

H, ROUNDS, SIZE = 4, 3, 40
CONFIG = {"model.dense_bytes": str(SIZE), "run.seed": "0"}


class Desk:
    """`replicas` (or [min, max]) of local SGD over `ROUNDS` rounds of `H` steps; `strategy` are other settings of it,
    keywords are FleetSettings' fields."""

    def __init__(
        self,
        replicas=3,
        *,
        run=None,
        checkpoint=None,
        restored=None,
        strategy=None,
        total=H * ROUNDS,
        faults=(),
        **fleet,
    ):
        own = {"name": "local_sgd", "inner_steps": H} | (strategy or {})
        strategy = strategies.resolve(StrategySettings(**own))
        self.plan = RunPlan(
            run=run or RunSettings(eval_every=0),
            checkpoint=checkpoint or CheckpointSettings(every=0),
            strategy=strategy,
            fleet=FleetSettings(replicas=replicas, **fleet),
            total=total,
            directory="/runs/x",
            restore="/runs/x/checkpoints/round_000001" if restored else None,
            restored=restored,
            faults=faults,
        )
        self.now = 0.0
        self.coordinator = Coordinator(self.plan, self.now)
        self.answers: dict[int, list[m.Answer]] = {i: [] for i in range(self.plan.fleet.max_replicas)}
        self.welcomes: dict[int, m.Welcome] = {}
        self.plans: dict[int, m.Plan] = {}
        self.events = []

    # ---- requests -------------------------------------------------------------------------------------------------

    def send(self, request, process="", number=0):
        self.coordinator.handle(request, self.now, process, number)
        self.collect()

    def join(self, *indices, digest="as built", config=CONFIG, **more):
        for index in indices:
            self.send(m.Join(index, digest, dict(config), **more))

    def arrive(self, *indices, **more):
        for index in indices:
            welcome = self.welcomes[index]
            fields = {
                "healthy": True,
                "steps": H,
                "tokens": 10,
                "loss": 1.0,
                "compute_s": 2.0,
                "sizes": (m.PayloadSize("params@4", "mean", SIZE),),
                "digest": "shared",
                "positions": {index: 8},
            }
            self.send(m.Arrival(index, welcome.incarnation, self.coordinator.round, **(fields | more)))

    def vote(self, *indices, ok=True, digest="received", generation=None, **more):
        for index in indices:
            number = self.plans[index].generation if generation is None else generation
            problem = "" if ok else "cut off"
            self.send(m.Vote(index, self.welcomes[index].incarnation, number, ok, digest, problem, **more))

    def offer(self, *indices, round_number=None):
        """These offer their state."""
        number = self.coordinator.round if round_number is None else round_number
        for index in indices:
            self.send(m.Offer(index, number, f"state of {index}", digest="shared"))

    def back(self, *indices, nbytes=100):
        """These have loaded the state that they were welcomed with, from the first that offers it."""
        for index in indices:
            welcome = self.welcomes[index]
            self.send(m.Back(index, welcome.incarnation, welcome.round, {min(welcome.state.sources): nbytes}))

    def keep(self, *indices, round_number=None):
        """These offer what they have received in a round."""
        number = self.coordinator.round if round_number is None else round_number
        for index in indices:
            missed = m.Missed(number, (), (0,), (1.0,), "received")
            self.send(m.Kept(index, missed, f"round of {index}"))

    def hush(self, *indices):
        """These do not answer."""
        for index in indices:
            incarnation = self.coordinator.members[index].incarnation
            self.coordinator.silent(index, incarnation, "does not answer", self.now)
            self.collect()

    def wake(self, *indices):
        """These answer again."""
        for index in indices:
            self.coordinator.heard(index, self.coordinator.members[index].incarnation, self.now)
            self.collect()

    def lose(self, *indices, why="killed"):
        for index in indices:
            self.coordinator.lost(index, self.coordinator.members[index].incarnation, why, self.now)
            self.collect()

    def wait(self, seconds):
        """Let the clock run, with a tick each second."""
        for _ in range(round(seconds)):
            self.now += 1.0
            self.coordinator.tick(self.now)
            self.collect()

    def save(self, *indices):
        """These have written their parts of the checkpoint of the last committed round."""
        for index in indices:
            number = self.coordinator.round
            self.send(m.Saved(index, number, {}, folder=f"checkpoints/round_{number:06d}"))

    def journal(self):
        """What the driver has written down."""
        return encoded("run", self.coordinator.journal(self.now), HostState())

    def restart(self, journal):
        """The driver has died, and another one goes on from this journal: all answers on their way are gone."""
        known, _ = decoded(journal, "run")
        self.coordinator = Coordinator(self.plan, self.now, known)
        self.drop_answers()

    # ---- sequences ------------------------------------------------------------------------------------------------

    def begin(self):
        """All join; the first Welcome of each is taken."""
        self.join(*self.answers)
        return self.take(*self.answers)

    def run_round(self, *indices, **more):
        """A round in which nothing happens; returns the commits."""
        indices = indices or tuple(self.answers)
        self.arrive(*indices, **more)
        self.take(*indices)
        self.vote(*indices)
        return self.take(*indices)

    # ---- answers and events ---------------------------------------------------------------------------------------

    def collect(self):
        for index, answer in self.coordinator.take_outbox():
            self.answers[index].append(answer)
            if isinstance(answer, m.Welcome):
                self.welcomes[index] = answer
            if isinstance(answer, m.Plan):
                self.plans[index] = answer
        self.events += self.coordinator.events
        self.coordinator.events.clear()

    def take(self, *indices):
        """The one answer that each of these has got since it was last asked for."""
        taken = []
        for index in indices:
            assert len(self.answers[index]) == 1, f"replica {index} got {self.answers[index]}"
            taken.append(self.answers[index].pop())
        return taken

    def silent(self, *indices):
        """Whether these have got no answer."""
        return not any(self.answers[index] for index in indices)

    def drop_answers(self):
        for answers in self.answers.values():
            answers.clear()

    def said(self, kind):
        return [event.data for event in self.events if event.kind == kind]

    @property
    def notices(self):
        return self.said("notice")

    @property
    def failure(self):
        return self.coordinator.failure

    @property
    def summary(self):
        return self.coordinator.summary()


def only(answers, kind):
    """All answers are of this kind; returns them."""
    assert all(type(answer) is kind for answer in answers), answers
    return answers
