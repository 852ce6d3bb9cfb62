"""The bytes of messages stay what they are, and what was written before can still be read."""

import json

import pytest
import torch

from .messages import CODECS, FILE, message_and_content

GOLDEN = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", CODECS)
def test_message_is_the_remembered_one(name: str) -> None:
    assert message_and_content(name)["message"] == GOLDEN[name]["message"]


@pytest.mark.parametrize("name", CODECS)
def test_remembered_message_decodes_to_what_it_did(name: str) -> None:
    codec = CODECS[name]
    message = torch.frombuffer(bytearray.fromhex(GOLDEN[name]["message"]), dtype=torch.uint8)
    assert codec.decode_mean([codec.parse(message)], [1.0]).tolist() == GOLDEN[name]["decoded"]


def test_no_message_is_left_of_codecs_that_are_gone() -> None:
    assert set(GOLDEN) == set(CODECS)
    assert len({entry["message"] for entry in GOLDEN.values()}) == len(CODECS)
