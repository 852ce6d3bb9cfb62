"""On Ray: replicas find each other through the driver and listen at their node's address; strangers get nowhere."""

import socket
import time
from types import SimpleNamespace

import pytest
import ray

from ray_lowcomm import strategies
from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import CheckpointSettings, FleetSettings, RunSettings, StrategySettings
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.book import RunPlan
from ray_lowcomm.engine.meeting import Meeting
from ray_lowcomm.engine.run_spec import RunSpec
from ray_lowcomm.runtime.driver import Driver
from ray_lowcomm.runtime.worker import WorkerPlan, live
from ray_lowcomm.transport import ports
from ray_lowcomm.transport.driver_line import DriverLine, RayChannel
from ray_lowcomm.transport.driver_store import DriverStore
from tests.ray.fleets import train_gpt

KEY = "of this run"


class Listening:
    """Notes what the process listens at because of the group, and lets strangers at it."""

    def __call__(self, context):
        before = set(ports.listening())
        train_gpt(context)
        self.opened = sorted(set(ports.listening()) - before)
        held = ports.count()
        for _ in range(50):
            with socket.socket() as stranger:
                stranger.setblocking(False)
                stranger.connect_ex(self.opened[0])
                time.sleep(0.002)
        self.grown = ports.count() - held


class Replica:
    """An actor that lives one replica's life."""

    def live(self, plan, member):
        loop = Listening()
        live(WorkerPlan(plan.driver, loop, plan.spec, plan.run_id, 0, 0, key=plan.key), member)
        return loop.opened, loop.grown


class Stranger:
    """What somebody else on the cluster may try who has come by the driver's handle."""

    def try_all(self, driver):
        answers = []
        for request in (b"\x80garbage", None, m.Said(0, "x"), m.Join(0, "digest", {}), m.Arrival(*range(11))):
            answers.append(ray.get(driver.request.remote(request, "guessed"), timeout=60))
        met = ray.get(driver.meet.remote(Meeting(0, 1, {"0/0": b"mine"}, (), 0.0), "guessed"), timeout=60)
        return answers, met, ray.get(driver.attach.remote(0, b"me"), timeout=60)


def test_replicas_listen_at_their_nodes_address_and_strangers_get_nowhere(ray_cluster, tmp_path):
    strategy = strategies.resolve(StrategySettings(name="local_sgd", inner_steps=2))
    run, checkpoint, fleet = RunSettings(eval_every=0), CheckpointSettings(every=0), FleetSettings(replicas=2)
    plan = RunPlan(run, checkpoint, strategy, fleet, 4, str(tmp_path))
    driver = ray.remote(Driver).options(num_cpus=0, max_concurrency=1000).remote(plan, False, KEY)
    ray.get(driver.start.remote(), timeout=60)
    stranger = ray.remote(Stranger).options(num_cpus=0).remote()
    replicas = [ray.remote(Replica).options(num_cpus=0.5, max_concurrency=2).remote() for _ in range(2)]
    spec = RunSpec(strategy, 4, str(tmp_path), run, checkpoint, fleet)
    worker = WorkerPlan(driver, None, spec, "rendezvous", 0, 0, key=KEY)
    lives = [replica.live.remote(worker, member) for member, replica in enumerate(replicas)]

    answers, met, attached = ray.get(stranger.try_all.remote(driver), timeout=120)
    assert all(isinstance(answer, m.Stop) and "\n" not in answer.reason for answer in answers)
    assert met.over
    assert met.told == {}
    assert "refuses" in attached

    host = ray.util.get_node_ip_address()
    for opened, grown in ray.get(lives, timeout=240):
        assert [where for where, _ in opened] == [host]
        assert grown < 25  # Ray's own come and go
    assert ray.get(driver.summary.remote(), timeout=60)["rounds"] == 2

    store = DriverStore(lambda told, wanted, wait_s: channel.meet(Meeting(0, 9, told, wanted, wait_s)), 60.0)
    channel = RayChannel(DriverLine(driver, 0, SimpleNamespace(token="any"), 60.0))
    ray.kill(driver)
    with pytest.raises(FleetError, match="the driver of the run is gone"):
        store.get("a")
    for actor in (stranger, *replicas):
        ray.kill(actor)
