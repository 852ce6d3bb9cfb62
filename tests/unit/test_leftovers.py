"""Leftovers of a test are found, whoever their parent is, and nothing else is taken for one."""

import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.leftovers import Leftovers


@pytest.fixture
def leftovers(request):
    return Leftovers(request.node.nodeid)


def test_nothing_is_found_where_nothing_is(leftovers, tmp_path):
    (tmp_path / "kept").touch()
    subprocess.run(["true"], check=True)
    assert leftovers.found(0.0) == []


def test_a_process_is_found_that_has_lost_its_parent(leftovers):
    command = "sleep 60 >/dev/null 2>&1 & echo $!"
    pid = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    try:
        assert leftovers.found(0.0) == [f"process {pid}: sleep 60"]
    finally:
        subprocess.run(["kill", pid], check=True)
    assert leftovers.found() == []


def test_a_socket_and_a_file_are_found(leftovers):
    with socket.create_server(("127.0.0.1", 0)), tempfile.NamedTemporaryFile(prefix="mine") as file:
        first, second = leftovers.found(0.0)
    assert first == f"temporary file {Path(file.name).name}"
    assert second.startswith("listening socket socket:[")
    assert leftovers.found(0.0) == []
