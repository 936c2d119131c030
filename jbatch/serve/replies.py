"""From outputs to text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from jbatch.request import EngineStoppedError, Output, Request
from jbatch.serve.errors import ApiError
from jbatch.serve.schemas import PromptTokensDetails, Reason, Usage
from jbatch.serve.streams import Streams
from jbatch.tokenizer import Detokenizer, Tokenizer


@dataclass
class Piece:
    """New text of the reply to prompt number `index`; `finish_reason` is set on its last piece."""

    index: int
    text: str = ""
    finish_reason: Reason | None = None


class Reply:
    """The texts that answer a group of prompts. Close it when done: what still runs is cancelled."""

    def __init__(self, streams: Streams, tokenizer: Tokenizer, requests: Sequence[Request]) -> None:
        """Submits the requests. Raises what `Engine.submit` raises."""
        self._prompt_tokens = sum(len(request.prompt) for request in requests)
        self._completion_tokens = 0
        self._cached_tokens = [0] * len(requests)
        self._detokenizers = [Detokenizer(tokenizer) for _ in requests]
        self._stream = streams.open(requests)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompt, completion = self._prompt_tokens, self._completion_tokens
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached_tokens)),
        )

    def close(self) -> None:
        """Cancels what still runs."""
        self._stream.close()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it becomes certain. Raises `EngineStoppedError` or `ApiError` where the engine gave up."""
        running = len(self._detokenizers)
        while running:
            pieces: dict[int, Piece] = {}
            for index, output in await self._stream.news():
                self._add(pieces.setdefault(index, Piece(index)), output)
            for piece in pieces.values():
                running -= piece.finish_reason is not None
                if piece.text or piece.finish_reason:
                    yield piece

    async def whole(self) -> list[Piece]:
        """The complete replies, in order of their prompts. Raises as `pieces` does."""
        replies = [Piece(index) for index in range(len(self._detokenizers))]
        async for piece in self.pieces():
            replies[piece.index].text += piece.text
            replies[piece.index].finish_reason = piece.finish_reason
        return replies

    def _add(self, piece: Piece, output: Output) -> None:
        detokenizer, reason = self._detokenizers[piece.index], output.finish_reason
        if reason == "cancelled":  # not by us: we would not listen any more
            raise EngineStoppedError("the server is stopping: it ended this request")
        if reason == "error":
            raise ApiError(500, "the engine failed during this request", code="engine_failed")
        if output.token is not None:
            self._completion_tokens += 1
            self._cached_tokens[piece.index] = output.cached_tokens
            if reason != "stop":  # the token that stops is not text
                piece.text += detokenizer.push(output.token)
        if reason is not None:
            piece.text += detokenizer.flush()
            piece.finish_reason = reason
