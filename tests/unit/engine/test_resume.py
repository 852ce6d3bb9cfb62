"""A run that dies and goes on from its newest checkpoint is the run that did not die, bit for bit."""

import pytest
import torch

from ray_lowcomm.core.settings import Fault, TrackCodec

from .local_run import Setup, mlp

VARIANTS = {
    "ddp": {"name": "ddp"},
    "local_sgd": {"name": "local_sgd", "inner_steps": 4},
    "local_adam": {"name": "local_adam", "inner_steps": 4},
    "diloco": {"name": "diloco", "inner_steps": 4},
    "diloco_sgd": {"name": "diloco", "inner_steps": 4, "outer_optimizer": "sgd", "outer_momentum": 0.0},
    "topk": {"name": "topk_diloco", "inner_steps": 4, "chunk_size": 4, "topk": 2},
    "dct": {"name": "dct_momentum", "inner_steps": 4, "chunk_size": 4, "topk": 2},
    "dct_decay": {"name": "dct_momentum", "inner_steps": 4, "chunk_size": 4, "topk": 2, "residual_decay": 0.9},
    "dct_buffer": {"name": "dct_momentum", "inner_steps": 4, "chunk_size": 4, "topk": 2, "residual": "buffer"},
    "dct_senders": {"name": "dct_momentum", "inner_steps": 4, "chunk_size": 4, "topk": 2, "reduce": "senders"},
    "dct_overlap": {"name": "dct_momentum", "inner_steps": 4, "chunk_size": 4, "topk": 2, "overlap_steps": 2},
    "dct_paper": {"name": "dct_momentum", "inner_steps": 4, "chunk_size": 4, "topk": 2, "variant": "paper"},
    "sharded": {"name": "sparse_loco", "inner_steps": 4, "chunk_size": 4, "topk": 2, "combine": "sharded"},
    "desloc": {"name": "desloc", "param_period": 4, "exp_avg_period": 3, "exp_avg_sq_period": 6},
    "desloc_random": {"name": "desloc", "param_period": 4, "periods": "random"},
    "desloc_nesterov": {"name": "desloc", "param_period": 4, "outer_optimizer": "nesterov", "exp_avg_period": 5},
    "desloc_codec": {
        **{"name": "desloc", "param_period": 4, "exp_avg_period": 3, "exp_avg_sq_period": 6},
        "codec": {
            "params": TrackCodec(topk=2, chunk_size=4, residual="buffer"),
            "default": TrackCodec(topk=2, chunk_size=4, rounding="stochastic"),
        },
    },
}


def assert_same_continuation(directory, strategy, dies_after, saved_every=1, **setup):
    """One run straight through; one that dies after a round and is resumed; all that follows must be equal."""
    whole = Setup(f"{directory}/whole", strategy, every=saved_every, **setup).go()
    broken = Setup(f"{directory}/broken", strategy, every=saved_every, **setup)
    assert broken.go(kill_after=dies_after).killed
    resumed = broken.go(resume=True)
    assert not whole.failure
    assert not resumed.failure

    first = resumed.records[0]["round"]
    assert 1 < first <= dies_after + 1
    assert resumed.records == whole.records[first - 1 :]
    begun = resumed.trace[0][0][0]
    for index in whole.models:
        assert resumed.state(index) == whole.state(index)
        assert resumed.trace[index] == [line for line in whole.trace[index] if line[0] >= begun]
        assert resumed.data[index].positions == whole.data[index].positions
    timeless = ("compute_s", "exchange_s", "wait_s", "outer_s", "blocked_s", "wall_s", "utilisation")
    assert {k: v for k, v in resumed.summary.items() if k not in timeless} == {
        k: v for k, v in whole.summary.items() if k not in timeless
    }
    return whole, resumed


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_strategy_with_dropout_and_batch_norm(tmp_path, variant):
    model = mlp(dropout=0.3, norm=True)
    whole, _ = assert_same_continuation(tmp_path, VARIANTS[variant], dies_after=3, saved_every=2, model=model)
    assert len({tuple(trace[-1]) for trace in whole.trace.values()}) == 3  # replicas saw different data


@pytest.mark.parametrize(
    "variant", ["ddp", "local_adam", "diloco", "dct", "dct_buffer", "dct_overlap", "desloc", "desloc_codec"]
)
def test_bf16_parameters(tmp_path, variant):
    model = mlp(dropout=0.1, dtype=torch.bfloat16)
    assert_same_continuation(tmp_path, VARIANTS[variant], dies_after=3, model=model, replicas=2)


@pytest.mark.parametrize("optimizer", ["sgd", "adopt", "plain_sgd"])
@pytest.mark.parametrize("variant", ["ddp", "dct", "desloc", "diloco"])
def test_inner_optimizers(tmp_path, variant, optimizer):
    assert_same_continuation(tmp_path, VARIANTS[variant], dies_after=3, optimizer=optimizer, replicas=2)


@pytest.mark.parametrize("policy", ["average", "local", "first"])
def test_buffer_policies(tmp_path, policy):
    model = mlp(norm=True)
    assert_same_continuation(tmp_path, VARIANTS["dct"], dies_after=2, model=model, buffers=policy, replicas=2)


def test_moments_that_are_reset_at_each_sync(tmp_path):
    assert_same_continuation(tmp_path, VARIANTS["local_sgd"], dies_after=2, state_on_sync="reset", replicas=2)


def test_one_replica(tmp_path):
    assert_same_continuation(tmp_path, VARIANTS["dct"], dies_after=2, replicas=1)


def test_saved_between_two_syncs_of_the_parameters(tmp_path):
    whole, resumed = assert_same_continuation(tmp_path, VARIANTS["desloc"], dies_after=4)
    saved = whole.said("manifest")[resumed.records[0]["round"] - 2][1]
    assert saved["step"] == 6  # moments are due at 3, 6, 9, … and 6, 12, …; parameters at 4, 8, …


def test_steps_since_the_checkpoint_are_taken_again(tmp_path):
    _, resumed = assert_same_continuation(tmp_path, VARIANTS["diloco"], dies_after=5, saved_every=3, steps=24)
    assert resumed.records[0]["round"] == 4


def test_two_resumes_in_a_row(tmp_path):
    whole = Setup(f"{tmp_path}/whole", VARIANTS["dct"]).go()
    broken = Setup(f"{tmp_path}/broken", VARIANTS["dct"])
    broken.go(kill_after=2)
    broken.go(resume=True, kill_after=4)
    last = broken.go(resume=True)
    assert last.records == whole.records[-len(last.records) :]
    assert [last.state(i) for i in range(3)] == [whole.state(i) for i in range(3)]


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    setup = Setup(str(tmp_path), VARIANTS["dct"])
    whole = setup.go()
    again = setup.go(resume=True)
    assert again.records == []
    assert all(not trace for trace in again.trace.values())
    assert [again.state(i) for i in range(3)] == [whole.state(i) for i in range(3)]
    assert again.summary["state_digests"] == whole.summary["state_digests"]
    assert (again.said("ended"), again.summary["members_lost"]) == ([True], 0)


def test_a_finished_run_can_be_made_longer(tmp_path):
    Setup(str(tmp_path), VARIANTS["diloco"], steps=12).go()
    longer = Setup(str(tmp_path), VARIANTS["diloco"], steps=20).go(resume=True)
    assert [(r["round"], r["step"]) for r in longer.records] == [(4, 16), (5, 20)]


def test_losses_before_the_checkpoint_stay_counted_and_faults_do_not_come_back(tmp_path):
    faults = (Fault("kill", replica=1, round=2), Fault("nan", replica=2, round=3))
    setup = Setup(str(tmp_path), VARIANTS["dct"], faults=faults)
    setup.go(kill_after=4)
    resumed = setup.go(resume=True)
    assert not resumed.failure
    summary = resumed.summary
    assert (summary["members_lost"], summary["nonfinite_rejected"]) == (1, 1)
    assert not any("fault" in text for text in resumed.said("notice"))
    assert len(set(summary["state_digests"].values())) == 1
