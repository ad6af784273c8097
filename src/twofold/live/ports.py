"""Finding free TCP ports."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Collection
from contextlib import ExitStack, closing
from typing import Final

_LOOPBACK: Final = "127.0.0.1"
_FIRST: Final = 20_000
_LAST: Final = 32_000
_TAKEN: Final = (errno.EADDRINUSE, errno.EACCES)


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen at `host`:`port` now. Raises OSError for a bad host."""
    with closing(_socket(host)) as sock:
        return _listens(sock, host, port)


def free_ports(count: int, avoid: Collection[int] = ()) -> list[int]:
    """`count` different free ports of the loopback address, none of them in `avoid`.

    Below the range that the kernel hands out to outgoing connections, so that a server which
    restarts finds its port still free. Raises OSError when there are not enough.
    """
    ports: list[int] = []
    span = _LAST - _FIRST
    with ExitStack() as held:
        # Two programs that look at the same time begin at different places.
        start = os.getpid() * 37
        for step in range(span):
            if len(ports) == count:
                break
            port = _FIRST + (start + step) % span
            if port in avoid:
                continue
            sock = held.enter_context(closing(_socket(_LOOPBACK)))
            if _listens(sock, _LOOPBACK, port):
                ports.append(port)
    if len(ports) < count:
        raise OSError(f"fewer than {count} free ports between {_FIRST} and {_LAST}")
    return ports


def _socket(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    # Ports of connections that have just ended count as free, as they do for a server.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sock


def _listens(sock: socket.socket, host: str, port: int) -> bool:
    try:
        sock.bind((host, port))
        sock.listen(1)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno not in _TAKEN:
            raise
        return False
    return True
