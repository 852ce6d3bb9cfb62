"""Checkpoints of replicas of several shards: put together for as many shards, for more, for fewer."""

import json

import pytest
import torch

from ray_lowcomm.core.errors import CheckpointError
from ray_lowcomm.core.nested import pack, placings, unpack
from ray_lowcomm.core.parts import Placing, Target, marks, whole_part
from ray_lowcomm.core.sharding import Part, Shard
from ray_lowcomm.engine.checkpoint import Needs, Source, load_member, save_tensors
from ray_lowcomm.engine.making import local_name, shared_name
from ray_lowcomm.engine.storage import Storage

UNSHARED = ("parameters/", "masters/", "strategy/residual/")
SHAPES = {"a.weight": (7, 3), "a.bias": (7,), "b": (1, 4), "c": (2, 6)}
DIMS = {"c": 1}  # the others are cut over their first dimension
WHOLE, OWNERS = {"n": (5,), "0": (2,)}, {"n": 1, "0": 0}  # whole on all shards, and who has them of two


def values(name, seed=0):
    """The whole tensor of an entry: a function of its name."""
    shape = next(s for n, s in (SHAPES | WHOLE).items() if f"/{n}/" in f"/{name}/")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(name.encode())))


def targets(shard):
    """What a shard holds: cut as torch.chunk cuts, and with more shards than one an owner for what is whole."""
    found = {}
    for name, shape in SHAPES.items():
        dim = DIMS.get(name, 0)
        chunks = torch.arange(shape[dim]).chunk(shard.count)
        mine = chunks[shard.number].tolist() if shard.number < len(chunks) else []
        start = tuple((mine[0] if mine else shape[dim]) if d == dim else 0 for d in range(len(shape)))
        size = tuple(len(mine) if d == dim else s for d, s in enumerate(shape))
        placing = Placing(shape, (dim,)) if shard.count > 1 else None
        found[name] = Target(Part(shape, start, size), placing, bool(mine))
    for name, shape in WHOLE.items():
        found[name] = Target(whole_part(shape), None, OWNERS[name] % shard.count == shard.number)
    return found


def here(entry, name, target, seed):
    """The part of an entry that a shard has."""
    whole = values(f"{entry}/{name}", seed)
    for dim, (start, size) in enumerate(zip(target.part.start, target.part.size, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole.clone()


def states(shard, member):
    """(shared, local) of a shard of a member."""
    held, shared, local, kept = targets(shard), {}, {}, {}
    for name, target in held.items():
        if target.exchanged:
            shared[f"strategy/anchor/{name}"] = here("strategy/anchor", name, target, 0)
            for entry in ("parameters", "strategy/residual", "strategy/residual_dct"):
                local[f"{entry}/{name}"] = here(entry, name, target, member)
        if target.exchanged or not target.part.whole:
            kept[name] = {"exp_avg": here("optimizer/all/0/state", name, target, member), "step": torch.tensor(3.0)}
    skeleton = pack([{"state": kept, "held": [[*held]]}], "all")
    if shard.count > 1:
        skeleton["all"] = distributed(skeleton["all"], held)
    local |= {f"optimizer/{name}": value for name, value in skeleton.items()}
    local["random/cpu"] = torch.tensor([shard.number])
    local["strategy/owner_residual/values"] = torch.ones(3)
    return shared, local


def distributed(skeleton, held):
    """The skeleton of an optimizer's state as it is where parameters are DTensors: of all of them, on all shards."""
    whole = pack([{"state": {n: {"exp_avg": torch.zeros(1), "step": torch.zeros(1)} for n in held}}], "all")["all"]
    text = bytes(whole.tolist()).decode()
    for name, target in held.items():
        if target.placing is not None:
            plain = json.dumps({"tensor": f"all/0/state/{name}/exp_avg"})
            placed = [f"all/0/state/{name}/exp_avg", target.placing.shape, target.placing.cut]
            text = text.replace(plain, json.dumps({"dtensor": placed}))
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.fixture
def saved(tmp_path):
    """Makes a checkpoint of members 0 to 2, of so many shards."""

    def make(shards):
        storage, folder, files = Storage(str(tmp_path)), f"checkpoints/of_{shards}", {}
        for shard in [Shard(number, shards) for number in range(shards)]:
            named = {local_name(member, shard): states(shard, member)[1] for member in range(3)}
            named[shared_name(shard)] = states(shard, 0)[0]
            for name, state in named.items():
                files[name] = save_tensors(storage, f"{folder}/{name}", state, marks(state, targets(shard)))
        manifest = {"members": [0, 1, 2], "files": files} | ({"shards": shards} if shards > 1 else {})
        return Source(storage, folder, manifest)

    return make


def needs(shard, said=None):
    say = [].append if said is None else said.append
    return Needs(shard, targets(shard), ("strategy/owner_residual/", "strategy/residual_dct/"), say)


def read_files(monkeypatch):
    """Which files are opened from here on."""
    opened, plain = [], Storage.open
    monkeypatch.setattr(Storage, "open", lambda self, path: opened.append(path.rsplit("/")[-1]) or plain(self, path))
    return opened


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2), (2, 4), (4, 2), (3, 2)])
def test_all_that_is_kept_for_a_parameter_is_cut_anew(saved, before, after):
    source = saved(before)
    for shard in [Shard(number, after) for number in range(after)]:
        wanted, said = targets(shard), []
        shared, local = load_member(source, 1, (0, 1, 2), UNSHARED, needs(shard, said))
        assert set(shared) == {f"strategy/anchor/{n}" for n, t in wanted.items() if t.exchanged}
        for name, target in wanted.items():
            exchanged = [] if not target.exchanged else ["parameters", "strategy/residual"]
            for entry in exchanged:
                assert torch.equal(local[f"{entry}/{name}"], here(entry, name, target, 1))
            if target.exchanged:
                assert torch.equal(shared[f"strategy/anchor/{name}"], here("strategy/anchor", name, target, 0))
                kept = here("strategy/residual_dct", name, target, 1) * (before == after)  # lost, or as it was
                assert torch.equal(local[f"strategy/residual_dct/{name}"], kept)
        placed = placings(local["optimizer/all"])
        state = unpack({n.removeprefix("optimizer/"): v for n, v in local.items()}, "all")[0]["state"]
        for name, target in wanted.items():
            assert torch.equal(state[name]["exp_avg"], here("optimizer/all/0/state", name, target, 1))
            assert state[name]["step"] == 3.0
            assert placed[f"all/0/state/{name}/exp_avg"] == target.placing
        assert ("strategy/owner_residual/values" in local) == (before == after)
        assert local.get("random/cpu", torch.tensor([-1])).item() == (shard.number if shard.number < before else -1)
        lost = [text.partition(" ")[0] for text in said]
        assert lost == ([] if before == after else ["strategy/owner_residual", "strategy/residual_dct"])


def test_of_a_model_that_is_all_cut_a_shard_reads_its_own_files(saved, monkeypatch):
    monkeypatch.setitem(globals(), "WHOLE", {})
    source, opened = saved(4), read_files(monkeypatch)
    load_member(source, 1, (0, 1, 2), UNSHARED, needs(Shard(2, 4)))
    assert opened == ["shared.s2of4.safetensors", "replica_0001.s2of4.safetensors"]


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_joiner_gets_its_part_of_the_lowest_members_optimizer(saved, shards):
    source = saved(2)
    for shard in [Shard(number, shards) for number in range(shards)]:
        state, local = load_member(source, 7, (0, 1, 2, 7), UNSHARED, needs(shard))
        assert local is None
        for name, target in targets(shard).items():
            moment = state[f"optimizer/all/0/state/{name}/exp_avg"]
            assert torch.equal(moment, here("optimizer/all/0/state", name, target, 0))
        assert not any(name.startswith(("parameters/", "random/")) for name in state)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_the_mean_of_what_is_unshared_stays_with_fewer_replicas(saved, shards):
    source = saved(2)
    for shard in [Shard(number, shards) for number in range(shards)]:
        new = [load_member(source, member, (0, 2), UNSHARED, needs(shard))[1] for member in (0, 2)]
        for name, target in targets(shard).items():
            if target.exchanged:
                old = torch.stack([here("parameters", name, target, member) for member in range(3)]).mean(0)
                mean = torch.stack([state[f"parameters/{name}"] for state in new]).mean(0)
                torch.testing.assert_close(mean, old)


def test_another_model_is_seen_by_its_shapes(saved):
    source, shard = saved(2), Shard(0, 1)
    other = targets(shard) | {"a.weight": Target(whole_part((9, 3)))}
    local = load_member(source, 0, (0, 1, 2), UNSHARED, Needs(shard, other))[1]
    assert local["parameters/a.weight"].shape != (9, 3)


def damage(path, kind):
    if kind == "missing":
        path.unlink()
    elif kind == "cut off":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["missing", "cut off", "flipped"])
@pytest.mark.parametrize("file", ["shared.s1of2.safetensors", "replica_0001.s1of2.safetensors"])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_damage_in_any_shards_file_is_named(saved, tmp_path, kind, file, shards):
    source = saved(2)
    damage(tmp_path / "checkpoints" / "of_2" / file, kind)
    with pytest.raises(CheckpointError, match=file):
        load_member(source, 1, (0, 1, 2), UNSHARED, needs(Shard(shards - 1, shards)))


def test_parts_that_are_nowhere_are_missed(saved):
    source, shard = saved(2), Shard(0, 2)
    name = shared_name(shard)
    state = {n: v[:1] for n, v in source.load(name).items() if n == "strategy/anchor/a.weight"}
    mark = json.dumps({"shape": [7, 3], "start": [0, 0]})
    source.manifest["files"][name] = save_tensors(
        source.storage, f"{source.folder}/{name}", state, {"strategy/anchor/a.weight": mark}
    )
    with pytest.raises(CheckpointError, match=r"have not all parts of strategy/anchor/a\.weight"):
        load_member(source, 1, (0, 1, 2), UNSHARED, needs(Shard(0, 1)))


def test_an_optimizer_that_saves_itself_begins_anew_with_other_shards(tmp_path):
    storage, said = Storage(str(tmp_path)), []
    state = {f"optimizer/{n}": v for n, v in pack([{"whole": {"m": torch.ones(7, 3)}}], "all").items()}
    files = {
        "shared.safetensors": save_tensors(storage, "c/shared.safetensors", {}),
        "replica_0000.safetensors": save_tensors(storage, "c/replica_0000.safetensors", state),
    }
    source = Source(storage, "c", {"members": [0], "files": files})
    assert load_member(source, 0, (0,), (), needs(Shard(0, 1)))[1].keys() == state.keys()
    assert load_member(source, 0, (0,), (), needs(Shard(0, 2), said))[1] == {}
    assert said == ["optimizer of the checkpoint is of 1 shards, here are 2, and cannot be cut anew: it begins anew"]
