"""What reaches into Ray's private parts, as far as that needs no cluster."""

import logging

import pytest
from ray._private.authentication import authentication_token_setup as setup

from ray_lowcomm.runtime.ray_private import silence_token_notice


@pytest.fixture
def told(monkeypatch):
    texts, handler = [], logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: texts.append(record.getMessage()))
    monkeypatch.setattr(setup.logger, "filters", [])
    # what a cluster that this process has had may have left
    monkeypatch.setattr(setup.logger, "disabled", False)
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)
    before = setup.logger.level
    setup.logger.setLevel(logging.WARNING)
    setup.logger.addHandler(handler)
    yield texts
    setup.logger.removeHandler(handler)
    setup.logger.setLevel(before)


def test_that_a_local_cluster_asks_for_a_token_is_not_told_but_that_it_does_not_is(told):
    setup._warn_token_auth_enabled()
    assert len(told) == 1
    silence_token_notice()
    setup._warn_token_auth_enabled()
    assert len(told) == 1
    setup._warn_token_auth_disabled()
    assert len(told) == 2
