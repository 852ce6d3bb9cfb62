"""What a dry run finds in a model before there is a fleet."""

import re

import pytest

from jobs.dry_run import estimate, print_dry_run
from ray_lowcomm.config import TrainConfig
from ray_lowcomm.core.errors import FleetError, ModelError


@pytest.mark.parametrize("setting", ["compile", "activation_checkpointing"])
def test_a_model_without_blocks_is_refused_where_something_is_to_be_done_with_them(setting):
    config = TrainConfig(model={"name": "small_cnn", setting: True}, data={"name": "digits"})
    with pytest.raises(ModelError, match=rf"model\.{setting} = True: SmallCNN has no blocks"):
        estimate(config)


def memory(**fleet):
    lines, _ = estimate(TrainConfig(model={"name": "small_cnn"}, data={"name": "digits"}, fleet=fleet))
    return lines["memory"]


@pytest.mark.parametrize("shards", [1, 2])
def test_memory_of_a_gpu_and_of_its_process_are_told_apart(shards):
    of = "shard" if shards > 1 else "replica"
    resources = {"CPU": 2, "GPU": shards}
    on_gpu, _, host = memory(shards_per_replica=shards, resources_per_replica=resources).partition("; its process ")
    assert re.match(rf"about [0-9.]+ KiB on the GPU of each {of} at its peak, without activations \(model ", on_gpu)
    assert "checkpoint" not in on_gpu
    assert "Python" not in on_gpu
    own = r"\(a checkpoint that is written [^,]+, Python, torch and Ray [^,]+\)\."
    assert re.match(rf"about [0-9.]+ [MG]iB of the machine's memory {own}", host)
    assert "Not known here, and on top of these: what CUDA takes of both" in host
    on_cpu = memory(shards_per_replica=shards, resources_per_replica={"CPU": 2})
    assert re.match(rf"about [0-9.]+ [MG]iB per {of} at its peak, without activations \(model .*Python, torch", on_cpu)
    assert "GPU" not in on_cpu


def test_replicas_in_one_process_are_on_no_gpu():
    assert "GPU" not in memory(transport="local", resources_per_replica={"GPU": 1})


def test_where_there_is_no_room_the_sums_are_said_all_the_same(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    fleet = {"replicas": 1, "resources_per_replica": {"CPU": 1, "GPU": 1}}
    with pytest.raises(FleetError, match="1 x 1 GPU = 1 GPU needed, 0 there"):
        print_dry_run(TrainConfig(model={"name": "small_cnn"}, data={"name": "digits"}, fleet=fleet))
    *lines, remark = capsys.readouterr().out.splitlines()
    names = ["model", "data", "fleet", "strategy", "sent", "on", "who", "who", "memory"]
    assert [line.split()[0] for line in lines] == names
    assert "of 14,458 parameters are sent whole" in remark
