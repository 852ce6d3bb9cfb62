import os
import shutil
import signal
import tempfile

import pytest

from tests.leftovers import Leftovers

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is first imported: no test waits for a hub that it cannot reach

WITH_PROCESSES = ("tests/ray/", "tests/jobs/")


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """Temporary files of these tests are nobody else's. Its path is short: Ray's sockets are in it."""
    tmp_path_factory.getbasetemp()  # stays where it is, so that it can be looked at later
    before, folder = os.environ.get("TMPDIR"), tempfile.mkdtemp(prefix="lc", dir="/tmp")
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    yield
    os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    tempfile.tempdir = None
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After a test that may start processes none of them is alive, and nothing else of it is there."""
    if not request.node.nodeid.startswith(WITH_PROCESSES):
        yield
        return
    leftovers = Leftovers(request.node.nodeid)
    yield
    left = leftovers.found()
    assert not left, "\n".join(left)


@pytest.fixture
def signals_of_a_new_process():
    """Handlers as in a process that has set none: `ray.init` and Tune leave theirs behind."""
    names = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL)
    names[signal.SIGINT] = signal.default_int_handler
    before = {name: signal.signal(name, handler) for name, handler in names.items()}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)
