"""The benchmark of replicas of several processes: what it judges, and that it can fail."""

from jobs.benchmarks import shards


def taken(shards, peak, predicted=None):
    return {"shards": shards, "peak": peak, "predicted": predicted or peak}


def found(**parts):
    memory = [taken(1, 1000), taken(2, 640), taken(4, 350)]
    sent = [{"shards": 1, "bytes_up": 100}, {"shards": 2, "bytes_up": 51}, {"shards": 4, "bytes_up": 26}]
    return {"memory": memory, "bytes": sent, "speed": {"ratio": 0.97}} | parts


def test_each_part_is_judged():
    assert shards.problems(found()) == []
    assert shards.problems({}) == []
    much = [taken(1, 1000), taken(4, 351)]
    assert shards.problems(found(memory=much)) == ["4 shards: 0.351 of one process's memory, not at most 0.35"]
    unlike = shards.problems(found(memory=[taken(1, 1000, 1111), taken(2, 500, 549)]))
    assert unlike == ["1 shards: 1.111 of their memory is predicted, not 1 within 0.1"]
    sent = [{"shards": 1, "bytes_up": 100}, {"shards": 2, "bytes_up": 53}]
    assert shards.problems(found(bytes=sent)) == ["2 shards: one sends 0.530 of the bytes, not 1/2"]
    slow = shards.problems(found(speed={"ratio": 0.96}))
    assert slow == ["two shards take 0.960 of plain FSDP2's steps, not 0.97"]


def test_without_a_replica_of_one_process_nothing_is_compared():
    assert shards.problems(found(memory=[taken(4, 9000)], bytes=[{"shards": 2, "bytes_up": 1}])) == []
