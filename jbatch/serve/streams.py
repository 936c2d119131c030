"""The bridge from the engine's thread to the event loop: one wake-up a step, however many requests there are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from jbatch.engine import Engine
from jbatch.request import Output, Request
from jbatch.serve.metrics import Meter, Metrics


class Stream:
    """The outputs of a group of requests, for one reader. Close it, or requests nobody reads run on."""

    def __init__(self, owner: Streams) -> None:
        self._owner = owner
        self._news: list[tuple[int, Output]] = []
        self._ready = asyncio.Event()
        self.ids: list[int] = []

    def push(self, index: int, output: Output) -> None:
        """Adds an output of the group's request number `index`."""
        self._news.append((index, output))
        self._ready.set()

    async def news(self) -> list[tuple[int, Output]]:
        """Waits for outputs; returns all there are, each with the number of its request in the group."""
        await self._ready.wait()
        self._ready.clear()
        news, self._news = self._news, []
        return news

    def close(self) -> None:
        """Cancels what still runs."""
        self._owner.close(self)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the outputs of one request go."""

    stream: Stream
    index: int
    meter: Meter


class Streams:
    """All open streams. Belongs to the event loop it is made in; only `_receive` runs on the engine's thread."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._places: dict[int, _Place] = {}
        self._sink = self._receive  # one object, so that the engine sees one sink

    def open(self, requests: Sequence[Request]) -> Stream:
        """Submits the requests, all or none. Raises what `Engine.submit` raises."""
        stream = Stream(self)
        try:
            for index, request in enumerate(requests):
                id_ = self._engine.submit(request, self._sink)
                stream.ids.append(id_)
                self._places[id_] = _Place(stream, index, self._metrics.begin(len(request.prompt)))
        except Exception:  # whatever it is, none of the group may run on unread
            stream.close()
            raise
        return stream

    def close(self, stream: Stream) -> None:
        """Cancels the stream's requests that still run."""
        for id_ in stream.ids:
            if place := self._places.pop(id_, None):
                self._engine.cancel(id_)
                place.meter.finish("cancelled")

    def _receive(self, outputs: list[Output]) -> None:
        self._loop.call_soon_threadsafe(self._deal, outputs)

    def _deal(self, outputs: list[Output]) -> None:
        for output in outputs:
            place = self._places.get(output.request_id)
            if place is None:  # closed meanwhile
                continue
            if output.token is not None:
                place.meter.token()
            if output.finish_reason is not None:
                del self._places[output.request_id]
                place.meter.finish(output.finish_reason)
            place.stream.push(place.index, output)
