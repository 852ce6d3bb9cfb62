"""What a replica is told of its run and of where it lives, and what of it all replicas must have alike."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from ray_lowcomm import strategies
from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.names import model_state, trained_names
from ray_lowcomm.core.settings import CheckpointSettings, Fault, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.core.sharding import local
from ray_lowcomm.engine.inside import Alone, Inside
from ray_lowcomm.engine.state import ReplicaState
from ray_lowcomm.engine.transport import Channel, Transport


@dataclass(frozen=True)
class RunSpec:
    """A run as each replica must know it; the same for all of them."""

    strategy: StrategySettings  # resolved
    steps: int
    directory: str
    run: RunSettings = field(default_factory=RunSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    fleet: FleetSettings = field(default_factory=FleetSettings)
    faults: tuple[Fault, ...] = ()
    buffers: str = "average"
    state_on_sync: str = "keep"
    skip_nonfinite: bool = True
    agreed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """Where a replica lives: its number, its lines to the others, and what becomes of it when a fault schedule says so.

    `die` ends it at once, `sleep` does nothing for some seconds of `clock`, `timer` measures how long things take,
    `cut` lets it answer nobody for some seconds, `corrupt` flips so many bits of what it sends next, `kill` ends at
    once its ``cohort``, its ``node`` or the ``driver``. `inside`: the other shards of the replica, where it has some.
    """

    member: int
    channel: Channel
    transport: Transport
    die: Callable[[], None]
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    timer: Callable[[], float] = time.perf_counter
    cut: Callable[[float], None] = time.sleep
    corrupt: Callable[[int], None] = lambda bits: None
    kill: Callable[[str], None] = lambda whom: None
    inside: Inside = field(default_factory=Alone)


def settings_to_agree(spec: RunSpec, state: ReplicaState) -> dict[str, str]:
    """What must be the same on all replicas, or they would drift apart or wait for each other for ever."""
    layout = state.tracks.layout
    moving = trained_names(state.model) | set(state.buffers.all)
    frozen = [local(value) for name, value in model_state(state.model).items() if name not in moving]
    return {
        **spec.agreed,
        **{f"strategy.{k}": repr(v) for k, v in asdict(spec.strategy).items() if v is not None},
        "inner.steps": str(spec.steps),
        "run.seed": str(spec.run.seed),
        "fleet.replicas": str(spec.fleet.replicas),
        "fleet.shards_per_replica": str(spec.fleet.shards_per_replica),
        "model.buffers": spec.buffers,
        "model.layout": layout.digest,
        "model.frozen": digest_tensors(frozen),
        "model.dense_bytes": ",".join(map(str, strategies.dense_bytes(spec.strategy, layout))),
        "inner.optimizer": state.tracks.optimizers.name,
        "inner.state_on_sync": spec.state_on_sync,
    }
