"""Remarks of several shards, or fragments, as those of one model."""

import pickle

import pytest

from ray_lowcomm.core.remarks import SHAPES, Counted, added_up, said

WHOLE = "{part} of {whole} are sent whole, in chunks of {shapes}"
REST = "{rest}% can be sent"


def test_counts_of_one_text_are_added_and_each_text_is_there_once():
    first = (Counted(WHOLE, 10, 1000, ("2x5",)), "a", Counted(REST, 1, 1000))
    other = ("b", Counted(WHOLE, 990, 2000, ("3", "2x5")), "a", Counted(REST, 0, 2000))
    both = added_up((*first, *other))
    assert said(both) == ("1,000 of 3,000 are sent whole, in chunks of 2x5, 3", "a", "99% can be sent", "b")
    assert added_up(both) == both
    assert pickle.loads(pickle.dumps(both)) == both


def test_where_nothing_is_counted_there_is_nothing_to_say():
    nothing = Counted(WHOLE, 0, 1000)
    assert said((nothing, "a")) == ("a",)
    assert added_up((nothing, nothing)) == (Counted(WHOLE, 0, 2000),)
    assert said((Counted(REST, 0, 0),)) == ()


@pytest.mark.parametrize(("more", "end"), [(0, "4"), (1, "4, …")])
def test_of_many_shapes_the_first_are_listed(more, end):
    assert str(Counted("{shapes}", 1, 1, tuple(map(str, range(SHAPES + more))))).endswith(end)
