"""What is no message, or has a field of another type, is refused in a line."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from ray_lowcomm.core.schedule import SyncOp
from ray_lowcomm.engine import messages as m
from ray_lowcomm.engine.checked import malformed
from ray_lowcomm.engine.coordinator import HANDLERS

OP = SyncOp("params", 4, 4)
ARRIVAL = m.Arrival(0, 1, 3, True, 4, 8, 1.5, 0.1, (m.PayloadSize("params@4", "mean", 40),), "digest", {0: 4})
GOOD = [
    m.Join(0, "digest", {"a": "b"}, ("exp_avg",), holds=None),
    ARRIVAL,
    replace(ARRIVAL, loss=None, digest=None, compute_s=1, metrics={"own": np.float32(1)}, positions={np.int64(3): 4}),
    m.Paused(0, 1, 2),
    m.Vote(0, 1, 2, True, bytes={"up": 4}),
    m.Offer(1, 2, [object()]),
    m.Kept(1, m.Missed(3, (OP,), (0, 1), (0.5, 0.5), "history"), object()),
    m.Back(1, 2, 3, {0: 40}),
    m.CaughtUp(1, 2, {}),
    m.Evaluated(0, 1, None),
    m.Saved(0, 1, {"file": (40, "hash")}),
    m.Fired(0, 1),
    m.Finished(0, None),
    m.Failed(0, "error", "traceback"),
    m.Said(0, "text"),
]


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_messages_as_they_are_sent_are_taken(message):
    assert malformed(message, HANDLERS) == ""


def test_these_are_all_kinds_of_messages():
    assert {type(message) for message in GOOD} == set(HANDLERS)


@dataclass(frozen=True)
class Other:
    member: int


@pytest.mark.parametrize("message", [None, 7, b"\0" * 9, {"member": 0}, Other(0), m.Noted(), m.Stop("x"), m.Join])
def test_what_is_no_request_is_refused(message):
    said = malformed(message, HANDLERS)
    assert type(message).__name__ in said
    assert "is refused" in said


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_each_field_of_another_type_is_named(message):
    for field in fields(message):
        if field.type == "Any" or field.name in ("state", "own", "reference"):
            continue  # references, which only the transport understands
        bad = replace(message, **{field.name: b"\n" * 10_000})
        said = malformed(bad, HANDLERS)
        assert said.startswith(f"message {type(message).__name__} is refused: {field.name} is ")
        assert len(said) < 250
        assert "\n" not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": True}, "steps is True, must be int"),
        ({"steps": 4.0}, "steps is 4.0, must be int"),
        ({"loss": "low"}, "loss is 'low', must be float | None"),
        ({"positions": {"0": 4}}, "positions is {'0': 4}, must be dict[int, int]"),
        ({"positions": [4]}, "positions is [4], must be dict[int, int]"),
        ({"sizes": (("params@4", "mean", 40),)}, "sizes is (('params@4', 'mean', 40),), must be tuple[ray_lowcomm"),
        ({"sizes": (m.PayloadSize("params@4", "mean", "40"),)}, "sizes is (PayloadSize("),
        ({"metrics": {"own": None}}, "metrics is {'own': None}, must be dict[str, float]"),
    ],
)
def test_the_value_and_what_is_allowed_are_said(change, said):
    assert said in malformed(replace(ARRIVAL, **change), HANDLERS)


def test_a_pair_has_two_and_each_is_looked_at():
    assert "must be dict[str, tuple[int, str]]" in malformed(m.Saved(0, 1, {"file": (40,)}), HANDLERS)
    assert "must be dict[str, tuple[int, str]]" in malformed(m.Saved(0, 1, {"file": ("hash", 40)}), HANDLERS)


def test_a_message_with_a_field_missing_is_refused():
    message = m.Said(0, "text")
    object.__delattr__(message, "text")
    assert "text is None, must be str" in malformed(message, HANDLERS)
