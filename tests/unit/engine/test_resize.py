"""Going on with another number of replicas: nothing of what they had learnt is lost, nobody is left out."""

import pytest
import torch
from safetensors.torch import load_file

from ray_lowcomm.engine.checkpoint import Source, load_member, save_tensors, write_manifest
from ray_lowcomm.engine.manifest import read_manifest
from ray_lowcomm.engine.storage import Storage

from .desk import Desk
from .local_run import Setup, mlp
from .test_resume import VARIANTS


def mean(tensors):
    return torch.stack(list(tensors)).mean(0)


def first_and_second(directory, variant, replicas, then, **setup):
    """A run of two rounds with `replicas`, and its continuation with `then`."""
    before = Setup(str(directory), VARIANTS[variant], replicas=replicas, steps=8, **setup).go()
    after = Setup(str(directory), VARIANTS[variant], replicas=then, steps=16, **setup).go(resume=True)
    assert not before.failure
    assert not after.failure
    return before, after


def exported(directory):
    """The final shared parameters of a run, flat."""
    tensors = load_file(f"{directory}/model/model.safetensors")
    return torch.cat([tensors[name].double().flatten() for name, _ in mlp()().named_parameters()])


@pytest.mark.parametrize("variant", ["dct", "dct_decay", "dct_overlap"])
def test_with_fewer_replicas_the_mean_of_the_parameters_stays(tmp_path, variant):
    before, after = first_and_second(tmp_path, variant, 4, 2)
    old = [before.parameters(i) for i in range(4)]
    assert (old[0] - old[1]).norm() > 1e-3
    torch.testing.assert_close(mean(after.begun.values()), mean(old), rtol=0, atol=1e-7)
    assert (after.begun[0] - after.begun[1]).norm() > 1e-3
    assert len(after.summary["state_digests"]) == 2


def test_the_mean_stays_for_bf16_parameters_up_to_their_rounding(tmp_path):
    before, after = first_and_second(tmp_path, "dct", 4, 2, model=mlp(dtype=torch.bfloat16))
    old = mean(before.parameters(i) for i in range(4))
    torch.testing.assert_close(mean(after.begun.values()), old, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("variant", ["sparse_loco", "dct_buffer", "desloc_codec", "dct_paper"])
def test_with_fewer_replicas_the_mean_of_buffers_stays(tmp_path, variant):
    """What the missing ones held back is with the others; nobody begins with more or less than all had together."""
    given = VARIANTS | {"sparse_loco": {"name": "sparse_loco", "inner_steps": 4, "chunk_size": 4, "topk": 2}}
    Setup(str(tmp_path), given[variant], replicas=4, steps=8).go()
    folder = sorted((tmp_path / "checkpoints").iterdir())[-1]
    old = [load_file(folder / f"replica_{i:04d}.safetensors") for i in range(4)]
    names = [n for n in old[0] if n.startswith(("strategy/", "parameters/"))]
    manifest = read_manifest(Storage(str(tmp_path)), f"checkpoints/{folder.name}")
    unshared = Setup(str(tmp_path), given[variant], replicas=1, steps=8).go(resume=True).replicas[0]._state.unshared
    source = Source(Storage(str(tmp_path)), f"checkpoints/{folder.name}", manifest)
    new = [load_member(source, member, (0, 2), unshared)[1] for member in (0, 2)]
    held_back = [n for n in names if n.startswith("strategy/") and any(state[n].any() for state in old)]
    assert held_back
    for name in names:
        torch.testing.assert_close(mean(s[name] for s in new), mean(s[name] for s in old), rtol=0, atol=1e-6)


@pytest.mark.parametrize("variant", ["dct", "diloco", "local_adam", "dct_buffer", "ddp", "desloc"])
def test_new_replicas_start_at_the_shared_parameters(tmp_path, variant):
    before = Setup(str(tmp_path), VARIANTS[variant], replicas=2, steps=8).go()
    shared = exported(tmp_path)
    after = Setup(str(tmp_path), VARIANTS[variant], replicas=3, steps=16).go(resume=True)
    assert not after.failure
    torch.testing.assert_close(after.begun[2], shared, rtol=0, atol=0)
    for index in (0, 1):
        torch.testing.assert_close(after.begun[index], before.parameters(index), rtol=0, atol=0)
    assert len(set(after.summary["state_digests"].values())) == 1
    executed = {float(s["step"]) for o in after.optimizers.values() for s in o.state.values()}
    assert executed == {16.0}  # the new one has taken over a step count, and moments, as a joiner does


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [(2, 3), (4, 2)])
def test_every_strategy_goes_on_with_another_fleet(tmp_path, variant, sizes):
    before, after = first_and_second(tmp_path, variant, *sizes)
    assert after.records[0]["round"] == before.records[-1]["round"] + 1
    assert after.records[-1]["step"] == 16
    assert after.records[-1]["members"] == list(range(sizes[1]))
    assert len(set(after.summary["state_digests"].values())) == 1
    # every replica takes up the learning rate where the run is
    assert {trace[0][:2] for trace in after.trace.values()} == {(8, 1e-2 / 1.8)}


def test_counters_and_data_positions_go_on(tmp_path):
    before, after = first_and_second(tmp_path, "dct", 4, 2)
    old, new = before.summary, after.summary
    assert new["inner_steps"] == 4 * 8 + 2 * 8
    assert new["tokens"] == 8 * new["inner_steps"]
    assert new["bytes_up"] > old["bytes_up"]
    assert new["dense_bytes"] == 2 * old["dense_bytes"]
    positions = after.said("manifest")[-1][1]["positions"]
    assert positions == {"0": 128, "1": 128, "2": 64, "3": 64}


def test_a_member_that_was_away_when_the_checkpoint_was_written_starts_as_a_joiner(tmp_path):
    setup = Setup(str(tmp_path), VARIANTS["dct"], steps=8)
    setup.go(kill_after=2)
    folder = tmp_path / "checkpoints" / "round_000001"
    assert (folder / "replica_0002.safetensors").exists()
    storage = Storage(str(tmp_path))
    manifest = read_manifest(storage, "checkpoints/round_000001")
    manifest["members"].remove(2)
    del manifest["files"]["replica_0002.safetensors"]
    write_manifest(storage, "checkpoints/round_000001", manifest, 10)
    resumed = setup.go(resume=True)
    assert not resumed.failure
    assert len(set(resumed.summary["state_digests"].values())) == 1


# ---- the arithmetic -------------------------------------------------------------------------------------------

UNSHARED = ("parameters/", "masters/", "strategy/residual/")


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of members 0 to 3 whose values are 0, 1, 2 and 9 (in what may be shifted, and in a moment)."""
    storage, folder, files = Storage(str(tmp_path)), "checkpoints/round_000001", {}
    for member, value in enumerate((0.0, 1.0, 2.0, 9.0)):
        names = ("parameters/w", "masters/w", "strategy/residual/w", "optimizer/w/exp_avg")
        state = {name: torch.full((2,), value) for name in names} | {"parameters/n": torch.tensor([member])}
        name = f"replica_{member:04d}.safetensors"
        files[name] = save_tensors(storage, f"{folder}/{name}", state)
    files["shared.safetensors"] = save_tensors(storage, f"{folder}/shared.safetensors", {"a": torch.ones(1)})
    return Source(storage, folder, {"members": [0, 1, 2, 3], "files": files})


def test_what_the_missing_had_not_shared_goes_to_the_others(saved):
    local = [load_member(saved, member, (0, 1), UNSHARED)[1] for member in (0, 1)]
    for name in ("parameters/w", "masters/w", "strategy/residual/w"):
        assert [state[name].tolist() for state in local] == [[2.5, 2.5], [3.5, 3.5]]  # mean 3 as before, 1 apart
    assert [state["optimizer/w/exp_avg"].tolist() for state in local] == [[0.0, 0.0], [1.0, 1.0]]
    assert [state["parameters/n"].tolist() for state in local] == [[0], [1]]


def test_those_who_begin_need_not_be_the_lowest(saved):
    local = [load_member(saved, member, (1, 3, 5), UNSHARED)[1]["parameters/w"].tolist() for member in (1, 3)]
    assert local == [[-1.0, -1.0], [7.0, 7.0]]  # mean 3 as before, 8 apart
    assert load_member(saved, 5, (1, 3, 5), UNSHARED)[1] is None


def test_with_as_many_or_more_replicas_nothing_is_shifted(saved):
    for replicas in (4, 6):
        assert load_member(saved, 1, range(replicas), UNSHARED)[1]["parameters/w"].tolist() == [1.0, 1.0]
    shared, local = load_member(saved, 5, range(6), UNSHARED)
    assert local is None
    assert shared["a"].tolist() == [1.0]


@pytest.mark.parametrize("variant", ["dct", "diloco", "dct_overlap"])
def test_steps_of_those_that_are_missing_count_with_those_of_the_others(tmp_path, variant):
    """What they had done since their last launch is in what the others begin with."""
    common = {"steps": 16, "every": 0}
    before = Setup(str(tmp_path), VARIANTS[variant], replicas=3, **common).go(stop_at=(2, 6))
    after = Setup(str(tmp_path), VARIANTS[variant], replicas=2, **common).go(resume=True)
    assert not after.failure
    taken = sum(len(trace) for outcome in (before, after) for trace in outcome.trace.values())
    assert len(before.trace[2]) % 4
    assert (after.summary["inner_steps"], after.summary["lost_inner_steps"]) == (taken, 0)
    said = "inner steps that it had not shared go out with those of the others"
    assert any(said in text and "replica 2" in text for text in after.said("notice"))


def test_steps_of_one_that_may_come_back_without_its_state_are_lost():
    manifest = {"unshared": {"0": [3, 30, 1], "1": [2, 20, 1]}}
    book = Desk(replicas=2).coordinator.book
    book.count_missing(manifest, present=[0], dealt=(0, 1))
    totals = book.totals
    assert (totals.lost_inner_steps, totals.skipped_steps, totals.inner_steps, totals.tokens) == (2, 1, 0, 0)
    assert "replica 1 of the checkpoint is missing" in book.events[-1].data
