"""Why a shard has ended, of what Ray raises."""

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from ray_lowcomm.core.errors import FleetError
from ray_lowcomm.runtime.shard_ends import why

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: ShardActor
\tpid: 71
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed \
by the OOM killer due to high memory usage, (2) ray stop --force was called"""
EXITED = (
    "Worker exit type: SYSTEM_ERROR Worker exit detail: Worker exits unexpectedly. Worker exits with an exit code 2."
)


class Died(ActorDiedError):
    def __init__(self, text):
        super().__init__()
        self.text = text

    def __str__(self):
        return self.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (KILLED, ": Worker unexpectedly exits with a connection error code 2. End of file"),
        (EXITED, ": Worker exits unexpectedly. Worker exits with an exit code 2"),
        ("The actor died.", ""),
    ],
)
def test_of_a_process_that_is_gone_there_is_what_ray_knows(text, told):
    assert why(Died(text), 71) == f"process 71 was killed, or has crashed: Died{told}"


def test_of_one_that_failed_there_is_its_error():
    failed = RayTaskError("run", "a traceback", ValueError("two\nlines")).as_instanceof_cause()
    assert why(failed, 71) == "process 71 has failed: ValueError: two lines"
    ours = RayTaskError("run", "a traceback", FleetError("the mesh is another")).as_instanceof_cause()
    assert why(ours, 0) == "its process has failed: the mesh is another"


def test_what_else_there_may_be_is_one_line_of_bounded_length():
    assert why(KeyError("x\ny" * 400), 7).startswith("process 7 is not heard of: KeyError: ")
    assert len(why(KeyError("x y" * 400), 7)) == 300
