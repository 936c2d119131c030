"""Load on a server over HTTP: texts of exact lengths, streamed completions, closed and open loops."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

from experiments.load import PROMPTS, Timeline
from jbatch.config import UserError
from jbatch.tokenizer import Tokenizer


class Texts:
    """Endless real texts of exact numbers of tokens; no two begin alike, so that none is found in a cache.

    What a server puts before every prompt, such as a token for its beginning, comes on top.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        lines = PROMPTS.read_text(encoding="utf-8").splitlines()
        ids = tokenizer.encode("\n".join(json.loads(line)["text"] for line in lines))
        self._ids = ids * 2
        self._period = len(ids)
        self._numbers = itertools.count(1)

    def cut(self, tokens: int) -> str:
        """The next text; cutting may change how a text's end is encoded, then the one after it is taken."""
        for _ in range(1000):
            number = next(self._numbers)
            head, at = self._tokenizer.encode(f"{number}. "), number * 97 % self._period
            text = self._tokenizer.decode([*head, *self._ids[at : at + tokens - len(head)]])
            if self._length(text) == tokens:
                return text
        raise UserError(f"no text of {tokens} tokens is to be had with this tokenizer: ask for more of them")

    def over_prefix(self, count: int, prefix_tokens: int, tail_tokens: int) -> list[str]:
        """`count` texts that begin with the same text and end each in its own way."""
        prefix = self.cut(prefix_tokens)
        texts = (prefix + self.cut(tail_tokens) for _ in itertools.count())
        fitting = (text for text in texts if self._length(text) == prefix_tokens + tail_tokens)
        return list(itertools.islice(fitting, count))

    def _length(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


@dataclass(frozen=True)
class Load:
    """Requests for a server, and when to send them."""

    name: str
    prompts: Sequence[str]
    output_tokens: int
    concurrency: int = 0
    """Clients, each of which sends its next request when the last has ended; with `due`, none."""
    due: Sequence[float] = ()
    """Seconds after which each request is sent, whether or not those before it have ended."""


@dataclass
class LoadResult:
    """What one load saw of a server; times in seconds of `time.perf_counter`."""

    begun: float
    drained: float = 0.0
    """When the last request was sent: from then on clients fall idle."""
    ended: float = 0.0
    timelines: list[Timeline] = field(default_factory=list)
    prompt_tokens: set[int] = field(default_factory=set)
    """Lengths of prompts as the server counts them, if it does."""
    client_share: float = 0.0
    """Share of one core that this process used meanwhile."""

    def tokens_per_second(self, until: float) -> float:
        """Output tokens that came before `until`, a second."""
        return sum(at <= until for line in self.timelines for at in line.tokens) / (until - self.begun)


class Lost(UserError):
    """No connection."""


class Refused(UserError):
    """An answer that is an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Sends completions to one OpenAI-compatible server. Raises `UserError` where it does not answer as it should."""

    def __init__(self, name: str, url: str, http: httpx.AsyncClient) -> None:
        self.name, self.url = name, url
        self._http = http
        self._options: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}

    async def begin(self) -> None:
        """Asks for the model's name and a token, and leaves out options that the server refuses, as few as will do."""
        wanted = {**self._options, "model": await self._get_model()}
        optional = "ignore_eos", "stream_options"
        for left_out in ((), optional[:1], optional[1:], optional):
            self._options = {name: value for name, value in wanted.items() if name not in left_out}
            try:
                await self.complete("Hello", 1, time.perf_counter(), LoadResult(0.0))
                return
            except Refused as error:
                if error.status not in (400, 422) or left_out == optional:
                    raise

    async def _get_model(self) -> str:
        try:
            reply = await self._http.get(f"{self.url}/v1/models")
        except httpx.TransportError as error:
            raise self._lost(error) from None
        try:
            if reply.status_code == 200:
                return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            pass
        raise self._refused(reply.status_code, reply.content, "/v1/models")

    async def complete(self, prompt: str, output_tokens: int, due: float, result: LoadResult) -> None:
        """Streams a greedy completion; adds when its tokens came to `result`, counted from `due`."""
        body = {"prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "stream": True, **self._options}
        chunks: list[float] = []
        usage: dict[str, int] = {}
        try:
            async with self._http.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    raise self._refused(reply.status_code, await reply.aread(), "/v1/completions")
                async for line in reply.aiter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        usage = self._read_chunk(data, chunks) or usage
        except httpx.TransportError as error:
            raise self._lost(error) from None
        if not chunks:
            raise UserError(f"{self.name} at {self.url} ended a stream without a token: is it a completion server?")
        result.timelines.append(Timeline(due, token_times(chunks, usage.get("completion_tokens", len(chunks)))))
        if "prompt_tokens" in usage:
            result.prompt_tokens.add(usage["prompt_tokens"])

    def _read_chunk(self, data: str, chunks: list[float]) -> dict[str, int]:
        """Notes a chunk's time if it carries output; returns its usage if it has any."""
        try:
            chunk = json.loads(data)
            if chunk.get("choices"):
                chunks.append(time.perf_counter())
            elif "error" in chunk:
                raise self._refused(200, data.encode(), "/v1/completions")
            return chunk.get("usage") or {}
        except (ValueError, AttributeError):
            raise UserError(f"{self.name} at {self.url} streams what is not JSON: {data[:80]!r}") from None

    def _lost(self, error: httpx.TransportError) -> UserError:
        return Lost(f"{self.name} at {self.url} does not answer ({str(error) or type(error).__name__}): is it running?")

    def _refused(self, status: int, content: bytes, path: str) -> UserError:
        return Refused(f"{self.name} answered {path} at {self.url} with {status}: {error_message(content)}", status)


def error_message(content: bytes) -> str:
    """What an error's body says, in one line."""
    text = content.decode(errors="replace")
    try:
        body = json.loads(text)
        error = body.get("error", body.get("detail", body))
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:200] or "no reason given"


def token_times(chunks: Sequence[float], count: int) -> list[float]:
    """When each of `count` tokens came, spread over the chunks: some servers put several in one, or end with none."""
    return [chunks[i * len(chunks) // count] for i in range(count)]


@asynccontextmanager
async def connect(name: str, url: str) -> AsyncIterator[Client]:
    """A client of the server at `url`, without limits of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(600, connect=10)
    # Without the environment's proxies: they would be measured too.
    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as http:
        yield Client(name, url, http)


async def drive(client: Client, load: Load) -> LoadResult:
    """Sends a load and waits for all of it, behind a progress bar."""
    with tqdm(total=len(load.prompts), desc=f"{client.name}, {load.name}", unit="req") as bar:
        result, cpu = LoadResult(time.perf_counter()), time.process_time()
        todo = iter(load.prompts)

        async def send(prompt: str, due: float) -> None:
            result.drained = max(result.drained, time.perf_counter())
            await client.complete(prompt, load.output_tokens, due, result)
            bar.update()

        if load.due:
            await asyncio.gather(*(_later(send, p, result.begun + at) for p, at in zip(todo, load.due, strict=True)))
        else:
            await asyncio.gather(*(_one_by_one(send, todo) for _ in range(load.concurrency)))
        result.ended = time.perf_counter()
        result.client_share = (time.process_time() - cpu) / (result.ended - result.begun)
    return result


async def _one_by_one(send: Any, todo: Iterator[str]) -> None:
    for prompt in todo:
        await send(prompt, time.perf_counter())


async def _later(send: Any, prompt: str, due: float) -> None:
    """Latency counts from when a request was due, however late this process is."""
    await asyncio.sleep(due - time.perf_counter())
    await send(prompt, due)
