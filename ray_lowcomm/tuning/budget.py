"""Whether a configuration can keep its replicas busy over a given link: the arithmetic, and nothing else.

A round takes H steps of computing, then an exchange:

    exchange = bytes each way · 8 / link + round trips · latency
    utilisation = computing / (computing + exchange)

Bytes are those that the collectives' schedules put on a replica's link (DESIGN: a gather (W−1)·S each way, a dense mean
and messages in shards 2·S·(W−1)/W); both directions have the whole link. Encoding and decoding are not in it: they are
part of a step's time where that was measured over whole rounds, and small where it was not.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ray_lowcomm.core.errors import SettingError
from ray_lowcomm.core.settings import StrategySettings

if TYPE_CHECKING:  # torch takes a second to import, and ``--help`` of a job with a budget section needs none of it
    from ray_lowcomm.estimate import RunCost

# of an exchange, in whole ones; as measured over a link of 40 ms with 4 replicas: 26, 46, 22 and 63 ms
ROUND_TRIPS = {"gather": 1, "mean": 1, "first": 1, "sharded": 2}
DRIVER_ROUND_TRIPS = 2  # a replica arrives and gets its plan; it votes and gets the commit


@dataclass(frozen=True)
class BudgetSettings:
    """The user's link, pace and demand. `latency_ms` is a round trip, as ping shows it; `link_mbit_s` as iperf3 does.

    The default link is a good domestic one across a continent. `step_s` has no default: it is the model's and the
    machine's, and every prediction is proportional to it.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    link_mbit_s: float = field(default=100.0, metadata={"help": "of each replica and direction, in Mbit/s (10^6)"})
    latency_ms: float = field(default=40.0, metadata={"help": "round trip between two replicas, as ping shows it"})
    step_s: float | None = field(
        default=None, metadata={"help": "seconds of one inner step (a run: compute_s / steps)"}
    )
    utilisation: float = field(default=0.9, metadata={"help": "least share of the time that is spent computing"})

    def __post_init__(self) -> None:
        for name in ("link_mbit_s", "step_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SettingError(f"budget.{name}", value, "must be greater than 0")
        if not 0 <= self.latency_ms < math.inf:
            raise SettingError("budget.latency_ms", self.latency_ms, "must be 0 or greater")
        if not 0 < self.utilisation < 1:
            raise SettingError("budget.utilisation", self.utilisation, "must be between 0 and 1")

    @property
    def seconds_per_step(self) -> float:
        """`step_s`.

        Raises:
            SettingError: it was not given.
        """
        if self.step_s is None:
            how = "must be given, in seconds: compute_s / inner.steps, from the summary.json of a short run"
            raise SettingError("budget.step_s", None, how)
        return self.step_s


@dataclass(frozen=True)
class Prediction:
    """Seconds of a whole run: computing, moving bytes, waiting for round trips (`round_trips` of them)."""

    compute_s: float
    transfer_s: float
    latency_s: float
    round_trips: int

    @property
    def exchange_s(self) -> float:
        """Seconds in which a replica does not compute."""
        return self.transfer_s + self.latency_s

    @property
    def utilisation(self) -> float:
        """Share of the time in which a replica computes."""
        return self.compute_s / (self.compute_s + self.exchange_s)


def predict(cost: "RunCost", budget: BudgetSettings) -> Prediction:
    """Seconds of a run of this cost. One replica exchanges with nobody."""
    wire = max(cost.moved["wire_up"], cost.moved["wire_down"])
    trips = 0
    if cost.replicas > 1:
        trips = sum(count * ROUND_TRIPS[combine] for combine, count in cost.collectives.items())
        trips += DRIVER_ROUND_TRIPS * cost.rounds
    return Prediction(
        compute_s=cost.steps * budget.seconds_per_step,
        transfer_s=wire * 8 / (budget.link_mbit_s * 1e6),
        latency_s=trips * budget.latency_ms / 1e3,
        round_trips=trips,
    )


def refusal(strategy: StrategySettings, cost: "RunCost", budget: BudgetSettings) -> str | None:
    """None if the run keeps to the budget, else one line that says why not, with every number of the sum.

    `strategy` is resolved; it names the algorithm and its H.
    """
    predicted = predict(cost, budget)
    if predicted.utilisation >= budget.utilisation:
        return None
    period = strategy.param_period or strategy.inner_steps
    name = f"{strategy.name} with H = {period}" if period else strategy.name
    least = f"budget.utilisation = {budget.utilisation:g}"
    cure = _cure(period, cost, budget) if period else f"{strategy.name} has no H to make larger"
    return (
        f"{name} would compute {predicted.utilisation:.3f} of the time, less than {least}: {arithmetic(cost, budget)}; "
        f"{cure}"
    )


def _cure(period: int, cost: "RunCost", budget: BudgetSettings) -> str:
    predicted = predict(cost, budget)
    allowed = predicted.compute_s * (1 - budget.utilisation) / budget.utilisation
    enough = math.ceil(round(period * predicted.exchange_s / allowed, 6))
    if enough > cost.steps:
        return f"not even one exchange of this size in {cost.steps} steps would do"
    return f"H of about {enough} would do"


def arithmetic(cost: "RunCost", budget: BudgetSettings) -> str:
    """The sum behind a prediction, on one line."""
    predicted = predict(cost, budget)
    compute, exchange = f"{predicted.compute_s:.4g} s", f"{predicted.exchange_s:.4g} s"
    wire = max(cost.moved["wire_up"], cost.moved["wire_down"])
    return (
        f"{cost.steps} steps x {budget.seconds_per_step:g} s = {compute} of computing; "
        f"{cost.rounds} exchanges of {cost.replicas} replicas move {_megabytes(wire)} each way "
        f"x 8 / {budget.link_mbit_s:g} Mbit/s = {predicted.transfer_s:.4g} s; "
        f"{predicted.round_trips} round trips x {budget.latency_ms:g} ms = {predicted.latency_s:.4g} s; "
        f"{compute} / ({compute} + {exchange}) = {predicted.utilisation:.3g}"
    )


def _megabytes(count: float) -> str:
    """Decimal megabytes, as links are measured in decimal megabits."""
    return f"{count / 1e6:.4g} MB"
