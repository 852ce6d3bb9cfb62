"""Why a shard of a replica has ended, in a line."""

import re

from ray.exceptions import RayActorError, RayTaskError

from ray_lowcomm.engine.member import describe

_DETAIL = re.compile(r"Worker exit detail: (.*?)(?: Some common causes|$)", re.MULTILINE)
MOST = 300


def why(error: BaseException, pid: int) -> str:
    """Of what Ray raises where it lived; `pid` 0: unknown. Ray does not know by which signal a process was ended."""
    process = f"process {pid}" if pid else "its process"
    if isinstance(error, RayTaskError):
        return f"{process} has failed: {describe(error.cause)}"[:MOST]
    if not isinstance(error, RayActorError):
        return f"{process} is not heard of: {type(error).__name__}: {' '.join(str(error).split())}"[:MOST]
    detail = _DETAIL.search(str(error))
    told = f": {detail[1].strip().rstrip('.')}" if detail else ""
    return f"{process} was killed, or has crashed: {type(error).__name__}{told}"[:MOST]
