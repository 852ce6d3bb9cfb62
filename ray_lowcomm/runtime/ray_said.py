"""What Ray tells a job of its cluster, as errors of the job: a line for the user, and all of it in a file."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray_lowcomm.runtime.ray_private import errors_handed_to, logs_folder

FILE = "ray.txt"
LONGEST = 200  # of what is quoted
WORKER_DIED = "A worker died or was killed while executing a task"  # the driver says it, with the replica
NODE_DEAD = re.compile(r"address: (\S+) .*has been marked dead", re.DOTALL)
LAST_WORDS = re.compile(r"^ *\[.* [CF] .*?\] \(raylet\) \S+ (.*)$", re.MULTILINE)


def line_of(text: str) -> str:
    """What a user is told of it: one line, '' for what is said elsewhere."""
    if WORKER_DIED in text:
        return ""
    if dead := NODE_DEAD.search(text):
        return f"Ray takes the node at {dead[1]} for dead: replicas there are lost, and come back when there is room"
    if "Raylet is terminated" in text:
        said = LAST_WORDS.findall(text)
        return "Ray's process on a node has ended" + (f": {_short(said[-1])}" if said else "")
    return f"Ray: {_short(next((line for line in text.splitlines() if line.strip()), ''))}"


@contextmanager
def told_in_lines(directory: str, say: Callable[[str], None]) -> Iterator[None]:
    """Context in which what Ray tells this job goes to a file in the run's folder (of a run whose folder is no local
    one, where Ray's own logs are), and a line of it to `say`, the same one once. `say` is called by a thread of Ray's.
    """
    path = Path(logs_folder() if "://" in directory else directory, FILE)
    known = set[str]()

    def take(text: str) -> None:
        line = line_of(text)
        where = ""
        try:
            with path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.strip()}\n\n")
            where = f" (all that Ray said is in {path})"
        except OSError as error:
            where = f" ({path} cannot be written: {error.strerror})"
        if line and line not in known:
            known.add(line)
            say(line + where)

    with errors_handed_to(take):
        yield


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[:LONGEST] + "…"
