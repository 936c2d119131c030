"""Responses that end when the client goes away: server-sent events, and waiting for a whole result."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from jbatch.serve.errors import describe

T = TypeVar("T")
_log = logging.getLogger(__name__)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises `ClientDisconnect` then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """Sends models as server-sent events, then `[DONE]`. Calls `close` at the end, however that comes about."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[BaseModel], close: Callable[[], None]) -> None:
        super().__init__(_frames(events), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        try:
            await unless_gone(receive, self.stream_response(send))
        except ClientDisconnect:
            pass
        finally:
            self._close()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _frames(events: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield f"data: {event.model_dump_json(exclude_unset=True)}\n\n"
    except Exception as error:  # the status has been sent: all that is left is to say so in the stream
        told = describe(error)
        if told.status == 500:
            _log.exception("a stream failed")
        yield f"data: {json.dumps(told.body)}\n\n"
    yield "data: [DONE]\n\n"
