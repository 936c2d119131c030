"""uvicorn, with our words at the start and our manners at the end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jbatch.engine import Engine


class Server(uvicorn.Server):
    """The first signal lets running requests finish, the second ends them, a third ends the process as it is."""

    def __init__(self, app: FastAPI, engine: Engine, ready: Callable[[], None], report: Callable[[str], None]):
        """`ready` is called when the server listens."""
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False))
        self._engine = engine
        self._ready = ready
        self._report = report
        self._signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no new connections and waits for those there are."""
        self._report("stopping: running requests finish first; once more to end them")
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        self._signals += 1
        self.should_exit = True
        if self._signals == 2:
            # With their requests cancelled, connections close by themselves. In a thread, since it waits for that.
            threading.Thread(target=self._end_requests, daemon=True).start()
        elif self._signals > 2:  # a client that does not read, or the compiler, holds up the end
            os._exit(128 + sig)

    def _end_requests(self) -> None:
        self._engine.stop(drain=False)
        time.sleep(1)  # for connections to say so
        self.force_exit = True  # those that remain wait for a client that sends or reads nothing
