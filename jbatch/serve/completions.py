"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response

from jbatch.request import RequestError
from jbatch.serve.replies import Piece, Reply
from jbatch.serve.schemas import CompletionRequest, TextChoice, TextCompletion
from jbatch.serve.service import Service, respond

MAX_TOKENS = 16
"""How long a completion is where the request does not say, as in OpenAI's API."""

router = APIRouter()


@router.post("/v1/completions", response_model=TextCompletion)
async def completions(http: Request, body: CompletionRequest) -> Response:
    """Continues a text or token ids, or each of several, whole or as a stream of server-sent events."""
    service = Service.of(http)
    service.check_model(body.model)
    prompts = _prompts(service, body)
    if body.max_tokens is None:
        requests = [body.engine_request(prompt, min(MAX_TOKENS, service.room(prompt))) for prompt in prompts]
    else:
        requests = [body.engine_request(prompt, body.max_tokens) for prompt in prompts]
    head: dict[str, Any] = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.card.id,
    }

    def chunks(reply: Reply) -> AsyncIterator[TextCompletion]:
        return _chunks(reply, head, include_usage=body.include_usage)

    def result(reply: Reply, pieces: list[Piece]) -> TextCompletion:
        return TextCompletion(**head, choices=[_choice(piece) for piece in pieces], usage=reply.usage)

    reply = service.reply(requests)
    return await respond(http, reply, stream=bool(body.stream), chunks=chunks, result=result)


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt; a flat list of ids is one prompt."""
    given = body.prompt
    one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    prompts: list[Any] = [given] if one else list(given)
    most = service.engine.config.max_queue
    if not 1 <= len(prompts) <= most:
        raise RequestError(f"prompt has {len(prompts)} prompts: it must have from 1 to {most}", "prompt")
    return [service.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt for prompt in prompts]


def _choice(piece: Piece) -> TextChoice:
    return TextChoice(index=piece.index, text=piece.text, logprobs=None, finish_reason=piece.finish_reason)


async def _chunks(reply: Reply, head: dict[str, Any], *, include_usage: bool) -> AsyncIterator[TextCompletion]:
    if include_usage:
        head = {**head, "usage": None}
    async for piece in reply.pieces():
        yield TextCompletion(**head, choices=[_choice(piece)])
    if include_usage:
        yield TextCompletion(**{**head, "usage": reply.usage}, choices=[])
