"""Whether a Ray cluster answers at an address: `ray.init` would ask for ever, and cannot be interrupted."""

import socket
import threading
import time

from ray_lowcomm.runtime.ray_private import ask_gcs, gcs_address

CONNECT_S = 15.0  # a head node may only just be starting
ANSWER_S = 40.0
RETRY_S = 1.0


def check_reachable(address: str, connect_s: float = CONNECT_S, answer_s: float = ANSWER_S) -> None:
    """`address` is as `ray.init` takes it: host:port, auto, or ray://host:port.

    Raises:
        ConnectionError: nobody answers there, or not Ray, within `connect_s` + `answer_s`.
        ValueError: it is not such an address.
        AuthenticationError: of Ray: a token is needed, and there is none.
    """
    if address.startswith("ray://"):
        _connect(address.removeprefix("ray://"), connect_s)
        return
    if "://" in address:
        raise ValueError("a cluster's address is host:port of its head node (port 6379, as a rule), and not a URL")
    place = gcs_address(address)
    _connect(place, connect_s)
    _ask(place, answer_s)


def _connect(place: str, within_s: float) -> None:
    host, _, port = place.partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("a cluster's address is host:port")
    deadline = time.monotonic() + within_s
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), max(0.1, deadline - time.monotonic())):
                return
        except OSError as error:
            if time.monotonic() + RETRY_S > deadline:
                why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
                raise ConnectionError(f"{place}: {why} (tried for {within_s:g} s)") from error
            time.sleep(RETRY_S)


def _ask(place: str, within_s: float) -> None:
    problems: list[Exception] = []

    def ask() -> None:
        try:
            ask_gcs(place)
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=ask, name="ask-gcs", daemon=True)
    thread.start()
    thread.join(within_s)
    if problems and isinstance(problems[0], RuntimeError | ValueError):
        raise problems[0]
    if problems or thread.is_alive():
        why = str(problems[0]).splitlines()[0] if problems else f"no answer within {within_s:g} s"
        raise ConnectionError(f"{place} takes connections, but is no Ray head node: {why}")
