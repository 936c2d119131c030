"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from jbatch.request import RequestError
from jbatch.serve.replies import Piece, Reply
from jbatch.serve.schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
)
from jbatch.serve.service import Service, respond

router = APIRouter()


@router.post("/v1/chat/completions", response_model=ChatCompletion)
async def chat_completions(http: Request, body: ChatRequest) -> Response:
    """Continues a chat, whole or as a stream of server-sent events."""
    service = Service.of(http)
    service.check_model(body.model)
    prompt = _prompt(service, body)
    most = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    request = body.engine_request(prompt, service.room(prompt) if most is None else most)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.card.id}

    def chunks(reply: Reply) -> AsyncIterator[ChatChunk]:
        return _chunks(reply, head, include_usage=body.include_usage)

    def result(reply: Reply, pieces: list[Piece]) -> ChatCompletion:
        return _completion(reply, pieces, head)

    reply = service.reply([request])
    return await respond(http, reply, stream=bool(body.stream), chunks=chunks, result=result)


def _prompt(service: Service, body: ChatRequest) -> list[int]:
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    if not messages:
        raise RequestError("messages is empty: it needs at least one message", "messages")
    try:
        return service.encode(service.tokenizer.apply_chat_template(messages))
    except ValueError as error:
        raise RequestError(str(error), "messages") from None


def _completion(reply: Reply, pieces: list[Piece], head: dict[str, Any]) -> ChatCompletion:
    choices = [
        ChatChoice(
            index=piece.index,
            message=ChatMessage(role="assistant", content=piece.text),
            finish_reason=piece.finish_reason,
        )
        for piece in pieces
    ]
    return ChatCompletion(**head, object="chat.completion", choices=choices, usage=reply.usage)


async def _chunks(reply: Reply, head: dict[str, Any], *, include_usage: bool) -> AsyncIterator[ChatChunk]:
    head = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if include_usage else {})

    def chunk(delta: ChatDelta, piece: Piece) -> ChatChunk:
        choice = ChatChunkChoice(index=piece.index, delta=delta, finish_reason=piece.finish_reason)
        return ChatChunk(**head, choices=[choice])

    begun = False
    async for piece in reply.pieces():
        if not begun:
            begun = True
            yield chunk(ChatDelta(role="assistant", content=""), Piece(piece.index))
        yield chunk(ChatDelta(content=piece.text) if piece.text else ChatDelta(), piece)
    if include_usage:
        yield ChatChunk(**{**head, "usage": reply.usage}, choices=[])
