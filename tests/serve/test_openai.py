"""The official client against a running server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from jbatch.request import Request, SamplingParams

HELLO = [{"role": "user", "content": "Hello!"}]


def test_chat(live):
    with live.client() as client:
        reply = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        parts = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]}],
            max_completion_tokens=12,
            temperature=0,
            extra_body={"ignore_eos": True, "a_field_nobody_knows": {"x": 1}},
        )
    choice = reply.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    prompt = live.tokenizer.encode("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n")
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == len(prompt) + 12
    assert reply.object == "chat.completion" and reply.model == "tiny" and reply.id.startswith("chatcmpl-")
    assert parts.choices[0].message.content == choice.message.content


def test_chat_stream(live):
    with live.client() as client:
        ask = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0}
        client.chat.completions.create(**ask)  # so that those that follow find equally much in the prefix cache
        whole = client.chat.completions.create(**ask)
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        plain = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks[1:-2]] == [None] * (len(chunks) - 3)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert plain[-1].choices and all(chunk.usage is None for chunk in plain)


def test_completions(live):
    with live.client() as client:
        ask = {"model": "tiny", "temperature": 0, "max_tokens": 10, "extra_body": {"ignore_eos": True}}
        texts = client.completions.create(prompt=["one", "two"], **ask)
        token_ids = client.completions.create(
            prompt=[live.tokenizer.encode("two"), live.tokenizer.encode("one")], **ask
        )
        single = client.completions.create(prompt=live.tokenizer.encode("two"), **ask)
        chunks = list(client.completions.create(prompt=["one", "two"], stream=True, **ask))
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert [choice.text for choice in token_ids.choices] == [choice.text for choice in texts.choices][::-1]
    assert single.choices[0].text == texts.choices[1].text
    assert texts.usage.completion_tokens == 20
    for index in (0, 1):
        pieces = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(piece.text for piece in pieces) == texts.choices[index].text
        assert [piece.finish_reason for piece in pieces][-1] == "length"


def test_usage_counts_cached_prompt_tokens(live):
    page = live.engine.config.page_size
    ask = {"model": "tiny", "prompt": [[5] * (2 * page + 1), [6] * (page + 1)], "max_tokens": 2}
    ask["extra_body"] = {"ignore_eos": True, "cache_salt": "counted"}
    with live.client() as client:
        replies = [client.completions.create(**ask) for _ in range(2)]
        replies += list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))[-1:]
        ask["extra_body"] |= {"tenant": "another"}
        replies += [client.completions.create(**ask)]
    assert [reply.usage.prompt_tokens_details.cached_tokens for reply in replies] == [0, 3 * page, 3 * page, 0]


def test_fields_that_openai_does_not_have_reach_the_engine(live, monkeypatch):
    asked, submit = [], live.engine.submit
    monkeypatch.setattr(live.engine, "submit", lambda request, sink: asked.append(request) or submit(request, sink))
    ours = {"tenant": "t", "program": "p", "deadline": 60, "pin_seconds": 0.5, "priority": 2, "cache_salt": "s"}
    with live.client() as client:
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, extra_body=ours)
        client.completions.create(model="tiny", prompt="x", max_tokens=1, extra_body=dict.fromkeys(ours))
    assert [{name: getattr(request, name) for name in ours} for request in asked] == [
        ours,
        {name: getattr(Request((1,)), name) for name in ours},
    ]


def test_default_lengths(live):
    with live.client() as client:
        text = client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
        prompt = [5] * (live.engine.config.max_request_len - 30)
        assert text.usage.completion_tokens == 16
        chat = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "x" * (len(prompt) - 20)}],
            extra_body={"ignore_eos": True},
        )
    assert chat.usage.total_tokens == live.engine.config.max_request_len


def test_stop_tokens_count_and_are_not_shown(live):
    prompt = live.tokenizer.encode("stop")
    # Drawn, not greedy: a random model's most likely tokens may go round in a circle.
    sampling = SamplingParams(temperature=2, seed=1, max_tokens=8, ignore_eos=True)
    tokens = live.engine.generate([Request(tuple(prompt), sampling)])[0].tokens
    end = next(index for index in range(2, 8) if tokens[index] not in tokens[:index])
    with live.client() as client:
        reply = client.completions.create(
            model="tiny",
            prompt=prompt,
            temperature=2,
            seed=1,
            extra_body={"stop_token_ids": [tokens[end]], "ignore_eos": True},
        )
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == live.tokenizer.decode(tokens[:end])
    assert reply.usage.completion_tokens == end + 1


def test_sampling_repeats_with_a_seed(live):
    with live.client() as client:
        ask = {"model": "tiny", "prompt": "seeds", "temperature": 2, "max_tokens": 20}
        ask["extra_body"] = {"ignore_eos": True, "top_k": -1, "min_p": 0.001, "priority": -1}
        texts = {client.completions.create(seed=2**40 + 5, top_p=0.99, **ask).choices[0].text for _ in range(3)}
    assert len(texts) == 1


def test_models(live):
    with live.client() as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "jbatch"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("org/other")


def test_64_streams_at_once_equal_what_each_gives_alone(live):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{live.base}/v1", api_key="x", max_retries=0) as client:

            def ask(n: int) -> dict:
                body = {"model": "tiny", "prompt": f"number {n} " * (1 + n % 5), "temperature": 0}
                return body | {"max_tokens": 8 + n % 17, "extra_body": {"ignore_eos": n % 2 == 0}}

            async def streamed(n: int) -> str:
                stream = await client.completions.create(stream=True, **ask(n))
                return "".join([chunk.choices[0].text async for chunk in stream])

            together = await asyncio.gather(*(streamed(n) for n in range(64)))
            alone = [(await client.completions.create(**ask(n))).choices[0].text for n in range(64)]
            assert together == alone
            assert len(set(alone)) > 32

    asyncio.run(run())
