"""Errors: a status, and always OpenAI's error object."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager

import httpx
import openai
import pytest
from tiny import TINY_ENGINE

from jbatch.request import DeadlineError, EngineStoppedError, Output, Request, Sink
from jbatch.telemetry import Snapshot

HELLO = [{"role": "user", "content": "Hello!"}]
CHAT, TEXT, CONTROLS = "/v1/chat/completions", "/v1/completions", "/admin/controls"


def error_of(reply: httpx.Response) -> dict:
    """The error object of a reply, checked for its shape."""
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and "\n" not in error["message"]
    assert error["type"] == ("server_error" if reply.status_code >= 500 else "invalid_request_error")
    return error


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"messages": None}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "tool_calls"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"top_p": 0}, "top_p"),
        (CHAT, {"top_k": -2}, "top_k"),
        (CHAT, {"min_p": 1.5}, "min_p"),
        (CHAT, {"priority": 2**40}, "priority"),
        (CHAT, {"tenant": "x" * 1025}, "tenant"),
        (CHAT, {"program": 5}, "program"),
        (CHAT, {"deadline": 0}, "deadline"),
        (CHAT, {"deadline": "soon"}, "deadline"),
        (CHAT, {"pin_seconds": 1e9}, "pin_seconds"),
        (CHAT, {"pin_seconds": True}, "pin_seconds"),
        (CHAT, {"stop_token_ids": [2**31]}, "stop_token_ids.0"),
        (CHAT, {"stop_token_ids": list(range(50))}, "stop_token_ids"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 10**6}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, "prompt"),
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"stop": ["x"]}, "stop"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"presence_penalty": 0.5}, "presence_penalty"),
        (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [1, 10**30]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [320]}, "prompt"),
        (TEXT, {"logprobs": 0}, "logprobs"),
        (TEXT, {"echo": True}, "echo"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"best_of": 2}, "best_of"),
        (TEXT, {"prompt": "x" * 1_000_000}, "prompt"),
        (TEXT, {"guided_regex": "x"}, "guided_regex"),
        (TEXT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"chat_template": "x"}, "chat_template"),
        (CHAT, {"continue_final_message": True}, "continue_final_message"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values(live, path, change, param, stream):
    body = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    reply = httpx.post(live.base + path, json={**body, "stream": stream, **change})
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == param


def test_values_that_ask_for_nothing(live):
    nothing = {"n": 1, "stop": [], "logit_bias": {}, "presence_penalty": 0.0, "tools": [], "logprobs": False}
    nothing |= {"response_format": {"type": "text"}, "tool_choice": "auto", "seed": None, "stream": None}
    body = {"messages": HELLO, "max_tokens": 2, **nothing}
    assert httpx.post(live.base + CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300},
        {"temperature": 1e-38},
        {"temperature": 1e6},
        {"top_p": 1e-300},
        {"top_k": 2**31 - 1},
        {"seed": 10**100},
        {"seed": -1},
        {"priority": -(2**31) + 1},
        {"stop_token_ids": [319, 0, 0]},
    ],
)
def test_extremes_are_served(live, extreme):
    reply = httpx.post(live.base + TEXT, json={"prompt": "x", "max_tokens": 3, "ignore_eos": True, **extreme})
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 3
    assert live.engine.accepting


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b"[]",
        b'"text"',
        b"null",
    ],
)
def test_bodies_that_are_not_what_they_should_be(live, content):
    reply = httpx.post(live.base + TEXT, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    error_of(reply)


def test_bodies_of_no_or_another_type(live):
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}):
        reply = httpx.post(live.base + TEXT, content=b'{"prompt": "x"}', headers=headers)
        assert reply.status_code == 400
        error_of(reply)


@pytest.mark.parametrize(
    ("change", "said", "param"),
    [
        ({"policyy": "fcfs"}, "there is no control 'policyy': there are policy, batching, ", "policyy"),
        ({"max_running": 4}, "there is no control 'max_running'", "max_running"),
        ({"policy": "best"}, "'fcfs'", "policy"),
        ({"policy": None}, "'fcfs'", "policy"),
        ({"running_limit": True}, "valid integer", "running_limit"),
        ({"running_limit": 1000}, "running_limit", None),
        ({"aging": "5"}, "valid number", "aging"),
        ({"aging": 0}, "aging is 0", None),
        ({"slo_ttft": [500, "x"]}, "valid number", "slo_ttft.1"),
        ({"slo_tpot": [1, 2, 3, 4, 5]}, "slo_tpot is", None),
    ],
)
def test_bad_controls_change_nothing(live, change, said, param):
    before = live.engine.controls
    reply = httpx.patch(live.base + CONTROLS, json={"batching": "static", **change})
    assert reply.status_code == 400, reply.text
    assert said in error_of(reply)["message"] and error_of(reply)["param"] == param
    assert live.engine.controls == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"policy": "\\ud800"}', b'{"aging": NaN}'])
def test_controls_that_are_not_what_they_should_be(live, content):
    reply = httpx.patch(live.base + CONTROLS, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    error_of(reply)


def test_too_large_a_body(live):
    reply = httpx.post(live.base + TEXT, json={"prompt": "x" * 9_000_000})
    assert reply.status_code == 413
    error_of(reply)


def test_routes(live):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", TEXT, 405),
        ("POST", "/health", 405),
        ("POST", "/v1/embeddings", 404),
    ):
        reply = httpx.request(method, live.base + path)
        assert reply.status_code == status
        assert path in error_of(reply)["message"]
        assert status != 405 or reply.headers["allow"]


def test_the_client_sees_its_own_exceptions(live):
    with live.client() as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="gpt-9", messages=HELLO)
        assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert bad.value.param == "temperature"


def test_a_full_queue_says_when_to_come_back(live):
    def ask(prompts: int) -> AbstractContextManager[httpx.Response]:
        body = {"prompt": ["x"] * prompts, "max_tokens": 8000, "ignore_eos": True, "stream": True}
        return httpx.stream("POST", live.base + TEXT, json=body, timeout=60)

    slots, queue = live.engine.config.max_slots, live.engine.config.max_queue
    with ask(queue) as first:
        assert first.status_code == 200
        deadline = time.monotonic() + 10
        while live.engine.snapshot().queued > queue - slots and time.monotonic() < deadline:
            time.sleep(0.01)
        with ask(slots - 1) as second, ask(2) as third, live.client() as client:
            assert (second.status_code, third.status_code) == (200, 503)
            assert live.engine.snapshot().queued < queue  # of two prompts the first did not stay
            with ask(1), pytest.raises(openai.InternalServerError) as full:
                client.completions.create(model="tiny", prompt="x")
    assert full.value.status_code == 503 and full.value.code == "queue_full"
    assert int(full.value.response.headers["retry-after"]) >= 1


def test_more_prompts_than_may_ever_wait(live):
    reply = httpx.post(live.base + TEXT, json={"prompt": ["x"] * 65})
    assert reply.status_code == 400 and error_of(reply)["param"] == "prompt"


class FailingEngine:
    """Gives each request one token and fails."""

    config = TINY_ENGINE
    accepting = True

    def submit(self, request: Request, sink: Sink) -> int:
        if not self.accepting:
            raise EngineStoppedError("the engine is not running")
        self.accepting = False
        sink([Output(1, 70, 0.0, None)])
        sink([Output(1, None, 0.0, "error")])
        return 1

    def snapshot(self) -> Snapshot:
        return Snapshot(pages_total=1, pages_free=1)

    def stop(self, *, drain: bool) -> None:
        self.accepting = False


def test_a_failed_engine(serve, capfd):
    body = {"prompt": "x"}
    with serve(FailingEngine()) as live:
        stream = httpx.post(live.base + TEXT, json={**body, "stream": True})
        frames = stream.text.split("\n\n")
        assert len(frames) in (3, 4) and frames[-2:] == ["data: [DONE]", ""]
        assert json.loads(frames[-3].removeprefix("data: "))["error"]["code"] == "engine_failed"
        for reply in (httpx.get(live.base + "/health"), httpx.post(live.base + TEXT, json=body)):
            assert reply.status_code == 503 and reply.headers["retry-after"]
            error_of(reply)
        live.engine.accepting = True
        whole = httpx.post(live.base + TEXT, json=body)
        assert whole.status_code == 500 and error_of(whole)["code"] == "engine_failed"
    assert "Traceback" not in capfd.readouterr().err


class LateEngine(FailingEngine):
    """Refuses each request, since it would take `wait` seconds."""

    wait = 0.0

    def submit(self, request: Request, sink: Sink) -> int:
        raise DeadlineError(request.deadline, self.wait)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_cannot_be_kept_says_when_to_come_back(serve, stream):
    with serve(LateEngine()) as live, live.client() as client:
        for wait, retry_after in ((0.2, "1"), (2.4, "3"), (1e6, "60")):
            live.engine.wait = wait
            with pytest.raises(openai.InternalServerError) as late:
                client.completions.create(model="tiny", prompt="x", stream=stream, extra_body={"deadline": 1.5})
            assert late.value.status_code == 503 and late.value.code == "deadline"
            assert late.value.response.headers["retry-after"] == retry_after
            assert "due in 1.5 s" in error_of(late.value.response)["message"]


def test_controls_are_not_served_unless_asked_for(serve):
    with serve(FailingEngine()) as live:
        for reply in (httpx.get(live.base + CONTROLS), httpx.patch(live.base + CONTROLS, json={"policy": "fcfs"})):
            assert reply.status_code == 404
            error_of(reply)


def test_a_default_of_ours_never_makes_a_prompt_too_long(live):
    most = live.engine.config.max_request_len
    reply = httpx.post(live.base + TEXT, json={"prompt": [5] * (most - 2), "ignore_eos": True}, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == 2


def test_half_a_surrogate_pair_in_a_role_is_a_bad_request(live):
    body = rb'{"messages": [{"role": "\ud800", "content": "x"}]}'
    reply = httpx.post(live.base + CHAT, content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert error_of(reply)["param"] == "messages"
