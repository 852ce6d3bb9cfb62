import signal

import pytest


@pytest.fixture
def signals_of_a_new_process():
    """Handlers as in a process that has set none: `ray.init` and Tune leave theirs behind."""
    names = dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1), signal.SIG_DFL)
    names[signal.SIGINT] = signal.default_int_handler
    before = {name: signal.signal(name, handler) for name, handler in names.items()}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)
