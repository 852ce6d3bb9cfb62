"""The store of a replica's own groups, with its values in this process: no Ray."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ray_lowcomm.engine.shard_values import ShardValues
from ray_lowcomm.transport.gloo import form_gloo
from ray_lowcomm.transport.shard_store import ShardStore

PATIENCE_S = 60.0


def store(values=None, timeout_s=PATIENCE_S):
    values = values or ShardValues()
    return ShardStore(lambda method, *arguments: getattr(values, method)(*arguments), timeout_s)


def test_values_are_set_and_read_by_all():
    values = ShardValues()
    one, other = store(values), store(values)
    one.set("a", "text")
    one.multi_set(["b", "c"], [b"\0\1", "c"])
    assert other.get("a") == b"text"
    assert other.multi_get(["c", "b"]) == [b"c", b"\0\1"]
    assert other.check(["a", "b"])
    assert not other.check(["a", "d"])
    one.set("a", "new")
    assert other.get("a") == b"new"
    assert one.num_keys() == 3
    assert one.delete_key("a")
    assert not other.delete_key("a")
    assert other.num_keys() == 2


def test_numbers_are_added_and_read_as_text_as_in_torchs_own_stores():
    ours, torchs = store(), dist.HashStore()
    for one in (ours, torchs):
        assert [one.add("n", 3), one.add("n", -1)] == [3, 2]
        assert one.get("n") == b"2"


@pytest.mark.parametrize(("before", "expected"), [(None, ""), (None, "a"), ("a", "a"), ("b", "a")])
def test_values_are_compared_and_set_as_in_torchs_own_stores(before, expected):
    ours, torchs = store(), dist.HashStore()
    found = []
    for one in (ours, torchs):
        if before is not None:
            one.set("k", before)
        found.append((one.compare_set("k", expected, "new"), one.check(["k"])))
    assert found[0] == found[1]


def test_what_does_not_come_in_time_is_named():
    one = store(timeout_s=0.05)
    one.set("a", "1")
    with pytest.raises(dist.DistStoreError, match=r"\['b'\] did not come within"):
        one.multi_get(["a", "b"])
    with pytest.raises(dist.DistStoreError):
        store().wait(["b"], timedelta(seconds=0.05))


def test_who_waits_hears_of_it():
    values = ShardValues()
    found = []
    waiting = threading.Thread(target=lambda: found.append(store(values).get("late")))
    waiting.start()
    store(values).set("late", "here")
    waiting.join(PATIENCE_S)
    assert found == [b"here"]


def test_many_add_at_once():
    values = ShardValues()
    with ThreadPoolExecutor(8) as threads:
        sums = list(threads.map(lambda _: store(values).add("n", 1), range(100)))
    assert sorted(sums) == list(range(1, 101))


def test_a_group_is_formed_over_it():
    values = ShardValues()

    def member(rank):
        mine = store(values)
        group = form_gloo(dist.PrefixStore("group", mine), rank, 3, "127.0.0.1", timedelta(seconds=PATIENCE_S))
        total = torch.tensor([float(rank)])
        group.allreduce([total]).wait()
        return total.item(), mine, group

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(member, range(3)))
    assert [total for total, _, _ in found] == [3.0] * 3
