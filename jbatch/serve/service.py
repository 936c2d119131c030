"""What the routes share: the engine, its tokenizer and the streams between them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing

from fastapi import Request as HTTPRequest
from fastapi import Response as HTTPResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from jbatch.engine import Engine
from jbatch.request import Request, RequestError
from jbatch.serve.errors import ApiError
from jbatch.serve.metrics import Metrics
from jbatch.serve.replies import Piece, Reply
from jbatch.serve.schemas import ModelCard
from jbatch.serve.sse import EventStream, unless_gone
from jbatch.serve.streams import Streams
from jbatch.tokenizer import Tokenizer


class Service:
    """One model behind one application. Make it on the event loop."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = Metrics(engine, name)
        self.card = ModelCard(id=name, created=int(time.time()), max_model_len=engine.config.max_request_len)
        self._most_characters = engine.config.max_request_len * tokenizer.longest_token
        self._streams = Streams(engine, self.metrics)

    @classmethod
    def of(cls, request: HTTPRequest) -> Service:
        """The service behind the application that got `request`."""
        service: Service = request.app.state.service
        return service

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` where a request names another model; none means ours."""
        if name not in (None, self.card.id):
            message = f"there is no model {name!r}: this server has {self.card.id!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids of `text`. Raises `RequestError` where it is not Unicode text, or longer than could ever fit.

        Encoding holds up the event loop, so a text that cannot fit is refused before.
        """
        if len(text) > self._most_characters:
            raise RequestError(
                f"the prompt has {len(text)} characters: that is more than {self.card.max_model_len} tokens", "prompt"
            )
        try:
            return self.tokenizer.encode(text, add_special=add_special)
        except (UnicodeEncodeError, TypeError):
            raise RequestError("the prompt has half of a surrogate pair in it: it is not text") from None

    def room(self, prompt: list[int]) -> int:
        """How many tokens may follow a prompt; at least 1, for the engine to refuse with its own words."""
        return max(1, self.engine.config.max_request_len - len(prompt))

    def reply(self, requests: Sequence[Request]) -> Reply:
        """Submits requests. Raises what `Engine.submit` raises."""
        return Reply(self._streams, self.tokenizer, requests)


async def respond(
    http: HTTPRequest,
    reply: Reply,
    *,
    stream: bool,
    chunks: Callable[[Reply], AsyncIterator[BaseModel]],
    result: Callable[[Reply, list[Piece]], BaseModel],
) -> HTTPResponse:
    """Answers with the reply, as chunks or whole. Ends the reply's requests if the client goes away."""
    if stream:
        return EventStream(chunks(reply), reply.close)
    with closing(reply):
        try:
            pieces = await unless_gone(http.receive, reply.whole())
        except ClientDisconnect:
            return HTTPResponse(status_code=499)  # nobody reads it
        return HTTPResponse(result(reply, pieces).model_dump_json(exclude_unset=True), media_type="application/json")
