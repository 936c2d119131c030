"""The HTTP server: its socket, its start and its end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jbatch.config import UserError
from jbatch.engine import Engine


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that nobody connects to a server that still loads.

    Raises `UserError` where the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({error}): choose another --host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        sock.close()
        raise refused(host, port, error) from None
    return sock
