"""The sockets of this process. Linux only: elsewhere none are found, and none are shut.

gloo listens as long as a group lives, though nobody has to come any more once all members are connected, and keeps
whatever connects until the group is closed: 1,000 short connections of a stranger are 1,000 descriptors.
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")
SO_ATTACH_FILTER = 26  # which Python does not name
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # the one instruction of a packet filter: return 0 bytes of the packet
INET = (socket.AF_INET, socket.AF_INET6)


def count() -> int:
    """Sockets that this process holds."""
    return len(list(_sockets()))


def listening() -> list[tuple[str, int]]:
    """Addresses and ports at which this process listens for TCP."""
    with contextlib.ExitStack() as stack:
        return sorted({(name[0], name[1]) for _, name in _listeners(stack)})


def shut(announced: bytes) -> int:
    """Let nobody in any more at the listening sockets whose address is part of what was `announced`: the kernel drops
    what comes for them. Connections that exist go on. Returns how many were shut; OSError where that is not allowed."""
    with contextlib.ExitStack() as stack:
        ours = [one for one, name in _listeners(stack) if _packed(one.family, name) in announced]
        for one in ours:
            program = ctypes.create_string_buffer(DROP)
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
        return len(ours)


def _sockets() -> Iterator[int]:
    for name in os.listdir(DESCRIPTORS) if DESCRIPTORS.exists() else ():
        with contextlib.suppress(OSError):  # it has been closed meanwhile
            if os.readlink(DESCRIPTORS / name).startswith("socket:"):
                yield int(name)


def _listeners(stack: contextlib.ExitStack) -> list[tuple[socket.socket, tuple[str, int]]]:
    """(socket, its address and port); they are copies of descriptors, which `stack` closes."""
    found = []
    for number in list(_sockets()):
        with contextlib.suppress(OSError):
            one = stack.enter_context(socket.socket(fileno=os.dup(number)))
            if one.family in INET and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append((one, one.getsockname()))
    return found


def _packed(family: int, name: tuple[str, int]) -> bytes:
    """Port and address as they are in a C sockaddr."""
    between = b"" if family == socket.AF_INET else bytes(4)
    return struct.pack("!H", name[1]) + between + socket.inet_pton(family, name[0])
