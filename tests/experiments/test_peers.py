"""The comparison of servers, against tiny servers in this process that only pretend to generate."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_server import Send, chunk, fake, generate, usage

from experiments import peers
from experiments.http_load import Load, LoadResult, Texts, connect, drive, error_message, token_times
from experiments.servers import Server, parse_servers
from jbatch.config import UserError
from jbatch.tokenizer import BYTE_OF, Tokenizer, byte_level_bpe


def driven(url: str, load: Load) -> LoadResult:
    async def go() -> LoadResult:
        async with connect("fake", url) as client:
            await client.begin()
            return await drive(client, load)

    return asyncio.run(go())


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_bpe([*BYTE_OF], [], pre="gpt-2"), eos_ids=frozenset())


def test_every_token_counts_and_each_request_is_sent_once():
    seen: list[str] = []

    def answer(body: dict, send: Send) -> None:
        seen.append(body["prompt"])
        assert body["ignore_eos"] and body["temperature"] == 0 and body["model"] == "fake"
        generate(body, send)

    with fake(answer) as url:
        result = driven(url, Load("3 at once", [f"p{i}" for i in range(9)], 5, 3))
    assert sorted(seen[1:]) == [f"p{i}" for i in range(9)]  # the first one asks whether it works
    assert [len(line.tokens) for line in result.timelines] == [5] * 9
    assert result.tokens_per_second(result.ended) == pytest.approx(45 / (result.ended - result.begun))
    assert result.prompt_tokens == {7} and result.begun < result.drained < result.ended


def test_usage_tells_how_many_tokens_a_chunk_holds():
    def answer(body: dict, send: Send) -> None:
        send(chunk("three tokens"))
        send(chunk("and three"))
        send(usage(6))

    with fake(answer) as url:
        (line,) = driven(url, Load("1 at once", ["p"], 6, 1)).timelines
    assert len(line.tokens) == 6 and len(set(line.tokens)) == 2


def test_without_usage_chunks_count():
    with fake(lambda body, send: [send(chunk("a")) for _ in range(4)] and None) as url:
        (line,) = driven(url, Load("1 at once", ["p"], 4, 1)).timelines
    assert len(line.tokens) == 4


def test_tokens_are_spread_over_chunks():
    assert token_times([1.0, 2.0], 4) == [1, 1, 2, 2]
    assert token_times([1.0, 2.0, 3.0], 2) == [1, 2]  # the last one carried no token
    assert token_times([1.0], 0) == []


def test_a_server_that_stalls_counts_against_requests_due_meanwhile():
    """Its second request was due while it was busy with the first, one at a time."""
    lock = threading.Lock()

    def answer(body: dict, send: Send) -> None:
        with lock:
            time.sleep(0.2)
            generate(body, send)

    with fake(answer) as url:
        result = driven(url, Load("open", ["p", "q", "r"], 1, due=(0.0, 0.05, 0.1)))
    waits = sorted(line.ttft for line in result.timelines)
    assert all(wait > least for wait, least in zip(waits, (0.19, 0.34, 0.49), strict=True))


def test_a_late_sender_counts_too():
    """Latency begins when a request was due, not when this process came round to sending it."""
    with fake(generate) as url:
        result = driven(url, Load("open", ["p"], 1, due=(-0.3,)))
    assert result.timelines[0].ttft > 0.3


@pytest.mark.parametrize("option", ["ignore_eos", "stream_options"])
def test_an_option_that_a_server_refuses_is_left_out(option):
    with fake(generate, refused=option) as url:
        result = driven(url, Load("1 at once", ["p"], 3, 1))
    assert len(result.timelines[0].tokens) == 3
    assert bool(result.prompt_tokens) == (option != "stream_options")  # usage is asked for as long as it is given


def test_an_answer_that_is_an_error_is_one_line():
    with (
        fake(lambda body, send: send("no\nroom"), refused="prompt") as url,
        pytest.raises(UserError, match="400: data: no room"),
    ):
        driven(url, Load("1 at once", ["p"], 1, 1))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": {"message": "no\\nroom"}}', "no room"),
        (b'{"detail": "not found"}', "not found"),
        (b"<html>", "<html>"),
        (b"", "no reason given"),
    ],
)
def test_what_an_error_says(body, told):
    assert error_message(body) == told


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ('{"error": {"message": "out of pages"}}', "out of pages"),
        ("nonsense", "not JSON"),
        ('{"choices": []}', "without a token"),
    ],
)
def test_errors_in_a_stream_are_one_line(sent, told):
    with fake(lambda body, send: send(sent)) as url, pytest.raises(UserError, match=told) as caught:
        driven(url, Load("1 at once", ["p"], 1, 1))
    assert "\n" not in str(caught.value)


def test_no_server_is_one_line():
    with fake(generate) as url:
        pass
    with pytest.raises(UserError, match=r"does not answer .* is it running"):
        driven(url, Load("1 at once", ["p"], 1, 1))


@pytest.mark.parametrize(
    ("urls", "commands", "told"),
    [
        ((), (), "nothing to measure"),
        (("http://x",), (), "not NAME="),
        (("a=ftp://x",), (), "not the URL of a server"),
        (("a=http://x:port",), (), "not a URL"),
        (("a=http://x", "a=http://y"), (), "twice"),
        (("a=http://x",), ("b=true",), "names b"),
        (("a=http://x",), ("a='",), "quotes"),
    ],
)
def test_bad_arguments(urls, commands, told):
    with pytest.raises(UserError, match=told):
        parse_servers(urls, commands)


def test_a_url_may_end_in_v1():
    assert parse_servers(("a=http://x:1/v1/",), ()) == [Server("a", "http://x:1")]


def test_a_command_starts_a_server_for_its_turn():
    with fake(generate) as url:  # for a free port
        pass
    command = (sys.executable, str(Path(__file__).parent / "fake_server.py"), url.split(":")[-1])

    async def go() -> None:
        async with Server("fake", url, command).up(wait=30, settle=0) as client:
            await client.begin()

    asyncio.run(go())
    with pytest.raises(UserError, match="does not answer"):
        driven(url, Load("1 at once", ["p"], 1, 1))

    asyncio.run(go())


def test_a_command_that_fails_says_why():
    with fake(generate) as url:
        pass
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"

    async def go() -> None:
        async with Server("fake", url, (sys.executable, "-c", code)).up(wait=30, settle=0):
            pass

    with pytest.raises(UserError, match=r"fake ended with code 3 \(no such model\)"):
        asyncio.run(go())


def test_a_server_that_runs_already_is_not_started():
    async def go(url: str) -> None:
        async with Server("fake", url, ("true",)).up(wait=30, settle=0):
            pass

    with fake(generate) as url, pytest.raises(UserError, match=r"answers .* already"):
        asyncio.run(go(url))


def test_texts_have_exact_lengths_and_begin_differently(tokenizer):
    texts = Texts(tokenizer)
    cut = [texts.cut(24) for _ in range(30)]
    assert {len(tokenizer.encode(text)) for text in cut} == {24}
    assert len({text[:4] for text in cut}) == 30
    over = texts.over_prefix(5, 40, 8)
    assert {len(tokenizer.encode(text)) for text in over} == {48}
    assert len({text[:30] for text in over}) == 1 and len(set(over)) == 5


def test_rounds_interleave_servers_and_rows_are_medians(tokenizer):
    settings = peers.Settings(
        rounds=2, concurrency=(1, 2), requests_each=2, prompt_tokens=16, output_tokens=4, rate=100, arrivals=3,
        fan_out=2, prefix_tokens=24, tail_tokens=8, fan_out_tokens=4,
    )  # fmt: skip
    with fake(generate) as one, fake(generate) as two:
        servers = [Server("one", one), Server("two", two)]
        measured = asyncio.run(peers.measure(settings, servers, Texts(tokenizer)))
    assert [row["server"] for row in measured] == ["one"] * 4 + ["two"] * 8 + ["one"] * 4
    rows = peers.summary(measured)
    assert [row["load"] for row in rows[::2]] == ["1 at once", "2 at once", "100 arrivals/s", "fan-out of 2"]
    assert rows[0]["seconds"] == pytest.approx((measured[0]["seconds"] + measured[12]["seconds"]) / 2)
    assert "times two (2 at once)" in peers.verdict(rows)
