"""The Ray collective backend and the local transport give the same state, bit for bit, for every strategy."""

import pytest
import ray

from ray_lowcomm import strategies
from ray_lowcomm.core.digest import digest_tensors
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings, TrackCodec
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.runtime.driver import Driver
from ray_lowcomm.runtime.worker import WorkerPlan, live
from ray_lowcomm.transport.local import LocalFleet
from tests.ray.fleets import train_gpt

REPLICAS = 4
CASES = {
    "ddp": {"name": "ddp"},
    "local_sgd": {"name": "local_sgd"},
    "local_adam": {"name": "local_adam"},
    "diloco": {"name": "diloco"},
    "desloc": {"name": "desloc", "param_period": 2, "exp_avg_period": 3, "exp_avg_sq_period": 4},
    "desloc_codec": {
        **{"name": "desloc", "param_period": 2, "exp_avg_period": 3, "exp_avg_sq_period": 4},
        "codec": {"params": TrackCodec(topk=64), "default": TrackCodec(topk=64, transform="dct", value_bits=4)},
    },
    "topk_diloco": {"name": "topk_diloco"},
    "dct_model": {"name": "dct_momentum"},
    "dct_buffer": {"name": "dct_momentum", "residual": "buffer"},
    "dct_overlap": {"name": "dct_momentum", "overlap_steps": 1},
    "topk_overlap": {"name": "topk_diloco", "overlap_steps": 2},
    "topk_fragments": {"name": "topk_diloco", "inner_steps": 4, "fragments": 2, "overlap_steps": 2},
    "buffer_overlap": {"name": "dct_momentum", "residual": "buffer", "overlap_steps": 1},
    "sparse_fragments": {"name": "sparse_loco", "inner_steps": 4, "fragments": 2, "overlap_steps": 1},
    "diloco_overlap": {"name": "diloco", "overlap_steps": 1},
    "diloco_fragments": {"name": "diloco", "inner_steps": 4, "fragments": 2, "overlap_steps": 1, "mix": 0.5},
    "sharded_fragments": {
        **{"name": "dct_momentum", "inner_steps": 4, "fragments": 2, "overlap_steps": 1},
        **{"value_bits": 2, "combine": "sharded"},
    },
    "desloc_overlap": {
        **{"name": "desloc", "param_period": 2, "exp_avg_period": 3, "exp_avg_sq_period": 4},
        "overlap_steps": 1,
    },
    "dct_paper": {"name": "dct_momentum", "variant": "paper"},
    "dct_2_bit": {"name": "dct_momentum", "value_bits": 2},
    "sparse_loco": {"name": "sparse_loco", "reduce": "senders"},
    "dct_sharded": {"name": "dct_momentum", "value_bits": 2, "combine": "sharded"},
    "sparse_loco_sharded": {"name": "sparse_loco", "reduce": "senders", "combine": "sharded"},
    "diloco_e3m0": {"name": "diloco", "value_bits": 4, "value_format": "e3m0", "rounding": "stochastic"},
}


def settings_of(case):
    given = CASES[case]
    own = {} if given["name"] in ("ddp", "desloc") else {"inner_steps": 2}
    return strategies.resolve(StrategySettings(**(own | given)))


def plan_and_spec(case, directory):
    strategy = settings_of(case)
    steps = {"ddp": 5, "desloc": 8, "desloc_codec": 8, "desloc_overlap": 8}.get(
        case, 10
    )  # five rounds; desloc: at 2, 3, 4, 6 and 8
    run, checkpoint = RunSettings(eval_every=0), CheckpointSettings(every=0)
    fleet = FleetSettings(replicas=REPLICAS)
    plan = RunPlan(run, checkpoint, strategy, fleet, steps, directory)
    return plan, RunSpec(strategy, steps, directory, run, checkpoint, fleet)


class Digesting:
    """A train function that notes a digest of all of a replica's own state."""

    def __init__(self):
        self.digests = {}

    def __call__(self, context):
        replica = train_gpt(context)
        state = replica._state
        tensors = state.shared() | {k: v for k, v in state.local().items() if k.startswith(("para", "opt", "strat"))}
        self.digests[context.index] = digest_tensors(tensors[name] for name in sorted(tensors))


class Replicas:
    """Actors that live through one run after another: starting processes is what costs."""

    def live(self, plan, member):
        loop = Digesting()
        live(WorkerPlan(plan.driver, loop, plan.spec, plan.run_id, 0, 0), member)
        return loop.digests[member]


@pytest.fixture(scope="module")
def actors(ray_cluster):
    # two threads: one lives, the other answers the driver's pings
    actors = [ray.remote(Replicas).options(num_cpus=0.5, max_concurrency=2).remote() for _ in range(REPLICAS)]
    yield actors
    for actor in actors:
        ray.kill(actor)


# what differs for a transport (means, gathers, shards, late ones, fragments) the others have, too
SLOW = ("dct_overlap", "topk_overlap", "sparse_fragments", "diloco_overlap")
SLOW += ("dct_buffer", "buffer_overlap", "dct_2_bit", "sparse_loco_sharded")
SLOW += (
    "desloc",
    "dct_model",
    "sparse_loco",
    "topk_diloco",
    "dct_sharded",
    "local_adam",
)  # the others have their parts


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_same_state_after_five_rounds(case, actors, tmp_path):
    plan, spec = plan_and_spec(case, str(tmp_path / "ray"))
    driver = ray.remote(Driver).options(num_cpus=0, max_concurrency=1000).remote(plan)
    ray.get(driver.start.remote(), timeout=60)
    worker = WorkerPlan(driver, None, spec, f"equal-{case}", 0, 0)
    over_ray = ray.get([a.live.remote(worker, i) for i, a in enumerate(actors)], timeout=240)
    summary = ray.get(driver.summary.remote(), timeout=60)
    ray.kill(driver)

    plan, spec = plan_and_spec(case, str(tmp_path / "local"))
    loop = Digesting()
    fleet = LocalFleet(plan, spec, lambda event: None)
    fleet.run(loop)
    local = fleet.coordinator.summary()

    assert fleet.coordinator.failure is None
    assert summary["rounds"] == local["rounds"] == 5
    assert over_ray == [loop.digests[i] for i in range(REPLICAS)]
    assert summary["state_digests"] == local["state_digests"]
    for name in ("bytes_up", "bytes_down", "wire_bytes_up", "wire_bytes_down", "dense_bytes"):
        assert summary[name] == local[name], name
    if case != "dct_paper":
        assert len(set(summary["state_digests"].values())) == 1
