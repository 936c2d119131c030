"""Servers to measure: where they are, and how to start and stop those that have a command."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import IO

import httpx

from experiments.http_load import Client, Lost, Refused, connect
from jbatch.config import UserError

STOP_SECONDS = 20
"""How long a server may take to stop before it is killed."""


@dataclass(frozen=True)
class Server:
    """A server to measure."""

    name: str
    url: str
    command: tuple[str, ...] = ()
    """Starts it; empty where it runs already."""

    @asynccontextmanager
    async def up(self, wait: float, settle: float) -> AsyncIterator[Client]:
        """A client of the server, which is started first and stopped afterwards if it has a command."""
        async with connect(self.name, self.url) as client:
            if not self.command:
                await client.begin()
                yield client
                return
            await self._check_free(client)
            with tempfile.TemporaryFile() as log:
                process = self._start(log)
                try:
                    await self._until_ready(client, process, log, wait)
                    await asyncio.sleep(settle)
                    yield client
                finally:
                    stop(process)

    async def _check_free(self, client: Client) -> None:
        try:
            await client.begin()
        except Lost:
            return
        except Refused:
            pass
        raise UserError(f"a server answers at {self.url} already: stop it, or leave out the command of {self.name}")

    def _start(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        try:
            # A session of its own, so that what it starts can be stopped with it.
            return subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except OSError as error:
            raise UserError(f"{self.name} cannot be started ({error.strerror}): {shlex.join(self.command)}") from None

    async def _until_ready(self, client: Client, process: subprocess.Popen[bytes], log: IO[bytes], wait: float) -> None:
        deadline = time.monotonic() + wait
        while True:
            try:
                return await client.begin()
            except (Lost, Refused) as error:
                if process.poll() is not None:
                    reason = f"ended with code {process.returncode} ({_last_line(log)})"
                    raise UserError(f"{self.name} {reason}: {shlex.join(self.command)}") from None
                if time.monotonic() > deadline:
                    raise UserError(f"{self.name} was not ready after {wait:.0f} s: {error}") from None
            await asyncio.sleep(0.25)


def parse_servers(urls: Sequence[str], commands: Sequence[str]) -> list[Server]:
    """Servers from `NAME=URL` and `NAME=COMMAND`. Raises `UserError`."""
    if not urls:
        raise UserError("there is nothing to measure: give --url NAME=URL, such as jbatch=http://127.0.0.1:8000")
    places = _named(urls, "--url", "http://127.0.0.1:8000")
    starts = _named(commands, "--command", "'python -m jbatch.serve'")
    if unknown := sorted(starts.keys() - places.keys()):
        raise UserError(f"--command names {', '.join(unknown)}, for which there is no --url")
    return [Server(name, _checked(url), _words(starts.get(name, ""))) for name, url in places.items()]


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and all that it has started."""
    for signum, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _named(pairs: Sequence[str], option: str, example: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value) or "/" in name:
            raise UserError(f"{option} {pair!r} is not NAME=..., such as jbatch={example}")
        if name in named:
            raise UserError(f"{option} names {name} twice")
        named[name] = value
    return named


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url!r} is not a URL ({error}): give one such as http://127.0.0.1:8000") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url!r} is not the URL of a server: give one such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise UserError(f"the command {command!r} cannot be read ({error}): check its quotes") from None


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"
