"""The address the server listens on. Imports nothing heavy: it is had before the model loads."""

from __future__ import annotations

import socket

from jbatch.config import UserError


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that nobody connects to a server that still loads.

    Raises `UserError` where the address cannot be had.
    """
    if not 0 <= port < 2**16:
        raise UserError(f"port is {port}: it must be from 0 to 65535")
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        if sock is not None:
            sock.close()
        raise cannot_listen(host, port, error) from None
    return sock


def cannot_listen(host: str, port: int, error: Exception) -> UserError:
    """What to tell the user of it."""
    reason = getattr(error, "strerror", None) or error
    return UserError(f"cannot listen on {host}:{port} ({reason}): choose another --port or --host")


def url(sock: socket.socket) -> str:
    """Where to find the server that listens on `sock`, seen from this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
