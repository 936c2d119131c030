"""`python -m jbatch.serve` as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from jbatch.controls import Controls
from jbatch.serve.config import ServeConfig, parse

SMALL = ["--max-running", "1", "--max-chunks", "1", "--max-model-len", "4096", "--num-pages", "512"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return {**os.environ, "JBATCH_CACHE": str(tmp_path_factory.mktemp("cache"))}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "jbatch.serve", *map(str, arguments)]


def run(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=environment, timeout=60)


@contextmanager
def server(environment: dict[str, str], *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that is ready, and its address; killed at the end if it has not ended."""
    process = subprocess.Popen(command(*arguments, "--port", 0), stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines = []
        while not lines or not lines[-1].startswith("jbatch: ready"):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        assert lines[0].startswith("jbatch: load") and any(": compile: " in line for line in lines)
        yield process, re.search(r"http://[\d.:]+", lines[-1])[0]
    finally:
        process.kill()
        process.communicate()


def test_help_is_quick_and_needs_no_jax(environment):
    script = (
        "import sys\nfrom jbatch.serve.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'jax', 'numpy', 'fastapi'} & set(sys.modules)"
    )
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < 3
    for word in ("examples:", "curl", "--max-running", "--max-num-seqs", "Tokens in a page", "--slo-ttft", "--admin"):
        assert word in done.stdout


def test_controls_are_options():
    config = parse(["m", "--scheduling-policy", "fcfs", "--slo-ttft", "500", "1000", "--slo-tpot=100", "--aging", "5"])
    assert config.controls == Controls(policy="fcfs", slo_ttft=(500.0, 1000.0), slo_tpot=(100.0,), aging=5.0)
    assert parse(["--batching", "static", "--admin"]) == ServeConfig(admin=True, controls=Controls(batching="static"))
    assert not ServeConfig().admin


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "no-such-model"),
        (["--page-size", "3"], "power of two"),
        (["--max_num_seqs=0"], "max_running"),
        (["--slo-ttft", "500", "0"], "slo_ttft"),
        (["--port", "70000"], "65535"),
        (["--host", "not a host"], "not a host"),
    ],
)
def test_mistakes_get_one_line(environment, arguments, said):
    done = run(environment, *arguments, *([] if "--port" in arguments else ["--port", "0"]))
    assert done.returncode == 2
    *before, last = done.stderr.splitlines()
    assert last.startswith("jbatch: error: ") and said in last
    assert all(line.startswith("jbatch: load") for line in before)


def test_a_port_in_use_is_said_before_the_model_loads(environment):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(environment, "no-such-model", "--port", port)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("jbatch: error: ") and str(port) in done.stderr


def stream_slowly(base: str, tokens: int) -> tuple[threading.Thread, list[str], threading.Event]:
    """Reads a stream in a thread; the list fills with its frames, the event says that it has begun."""
    frames, begun = [], threading.Event()

    def read() -> None:
        body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as reply:
            for line in reply.iter_lines():
                frames.append(line)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    return thread, frames, begun


def test_sigterm_drains(environment, model_directory):
    options = ["--served-model-name", "mine", "--policy", "fair", "--admin", *SMALL]
    with server(environment, model_directory, *options) as (process, base):
        assert httpx.get(f"{base}/v1/models").json()["data"][0]["id"] == "mine"
        assert httpx.get(f"{base}/admin/controls").json()["policy"] == "fair"
        thread, frames, begun = stream_slowly(base, 500)
        assert begun.wait(20)
        process.send_signal(signal.SIGTERM)
        thread.join(60)
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0
    frames = [frame for frame in frames if frame]
    assert frames[-1] == "data: [DONE]"
    assert json.loads(frames[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert "Traceback" not in said and said.endswith("jbatch: stopped\n")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base}/health")


def test_a_second_signal_ends_what_runs(environment, model_directory):
    with server(environment, model_directory, *SMALL) as (process, base):
        thread, frames, begun = stream_slowly(base, 4000)
        assert begun.wait(20)
        process.send_signal(signal.SIGINT)
        while not process.stderr.readline().startswith("jbatch: stopping"):
            pass
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 0
        thread.join(10)
    frames = [frame for frame in frames if frame]
    assert "the server is stopping" in frames[-2] and frames[-1] == "data: [DONE]"
    assert "Traceback" not in said


def test_interrupt_while_starting(environment, model_directory):
    process = subprocess.Popen(
        command(model_directory, "--port", 0), stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr.readline().startswith("jbatch: load")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode in (130, -signal.SIGINT)  # a shell shows 130 for both
    assert "Traceback" not in said
