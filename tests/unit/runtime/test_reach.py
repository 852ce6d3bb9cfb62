"""An address at which no cluster is: one line, soon, that names it and where it came from."""

import socket
import threading

import pytest

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.core.settings import FleetSettings
from ray_lowcomm.runtime import reach
from ray_lowcomm.runtime.cluster import connect, look_for_room


@pytest.fixture(autouse=True)
def in_no_cluster(monkeypatch):
    """This process may have joined one for other tests; nothing here gets as far as joining another."""
    monkeypatch.setattr("ray_lowcomm.runtime.cluster.ray.is_initialized", lambda: False)


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]  # bound and not listening: whoever connects is refused


@pytest.fixture
def silent_port():
    with socket.socket() as server:
        server.bind(("", 0))  # Ray takes 127.0.0.1 for this machine's own address
        server.listen()
        yield server.getsockname()[1]  # takes connections, and never says a word


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(reach.check_reachable, "__defaults__", (0.2, 0.3))


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_dead_address_is_named_with_the_setting_that_it_comes_from(closed_port, impatient, monkeypatch, form):
    address = form.format(closed_port)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(FleetError) as caught:
        connect(FleetSettings(replicas=1, address=address), prints=False)
    said = f"fleet.address = '{address}': no Ray cluster can be reached there: "
    assert str(caught.value).startswith(said)
    assert "Connection refused (tried for 0.2 s)" in str(caught.value)

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(FleetError) as caught:
        connect(FleetSettings(replicas=1), prints=False)
    assert str(caught.value).startswith(f"RAY_ADDRESS = '{address}': no Ray cluster can be reached there: ")


def test_something_else_listens_there(silent_port, impatient, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(reach, "ask_gcs", lambda place: never.wait())
    with pytest.raises(FleetError, match=rf":{silent_port} takes connections, but is no Ray head node: no answ"):
        connect(FleetSettings(replicas=1, address=f"127.0.0.1:{silent_port}"), prints=False)
    never.set()


def test_what_ray_says_of_it_is_said_in_one_line(silent_port, impatient, monkeypatch):
    def refuse(place):
        raise OSError("404\nand more")

    monkeypatch.setattr(reach, "ask_gcs", refuse)
    with pytest.raises(FleetError, match=r"is no Ray head node: 404$"):
        connect(FleetSettings(replicas=1, address=f"127.0.0.1:{silent_port}"), prints=False)


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://somewhere"])
def test_what_is_no_address_is_said_at_once(address):
    with pytest.raises(FleetError, match="a cluster's address is host:port"):
        connect(FleetSettings(replicas=1, address=address), prints=False)


def test_a_dry_run_looks_for_room(impatient, closed_port, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert look_for_room(FleetSettings(replicas=1)).endswith("as no cluster is named (fleet.address)")
    with pytest.raises(FleetError, match=r"fleet.replicas = 1000: the cluster is too small: 1000 x 1 CPU"):
        look_for_room(FleetSettings(replicas=1000))
    with pytest.raises(FleetError, match="no Ray cluster can be reached there"):
        look_for_room(FleetSettings(replicas=1, address=f"127.0.0.1:{closed_port}"))
    assert "in one process" in look_for_room(FleetSettings(replicas=1000, transport="local"))
