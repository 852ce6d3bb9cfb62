"""What a replica has done since the last launch, with other shards than before."""

import pytest

from ray_lowcomm.core.sharding import Shard
from ray_lowcomm.engine.work import Work


@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_that_are_others_have_all_tokens_between_them(count):
    parts = [Work(steps=2, tokens=9) for _ in range(count)]
    for number, part in enumerate(parts):
        part.cut_anew(17, Shard(number, count))
    assert sum(part.tokens for part in parts) == 17
    assert max(part.tokens for part in parts) - min(part.tokens for part in parts) <= 1
