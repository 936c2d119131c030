"""A real server in this process: the tiny random model behind uvicorn in a thread."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import openai
import pytest
from safetensors.numpy import save_file
from tiny import EOS, TINY, tiny_model

from jbatch.config import EngineConfig
from jbatch.engine import Engine
from jbatch.models.source import tensor_shapes
from jbatch.serve.app import create_app
from jbatch.serve.server import Server
from jbatch.serve.sockets import bind, url
from jbatch.tokenizer import BYTE_OF, Tokenizer, byte_level_bpe

SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *BYTE_OF]
TOKENS += [f"Ġ{n}" for n in range(TINY.vocab_size - len(TOKENS))]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Long requests, to leave them half done; few step shapes, since each takes seconds to compile.
ENGINE = EngineConfig(
    max_model_len=8192, max_running=8, max_slots=24, max_queue=64, num_pages=1024, chunk_size=32, max_chunks=1
)


@dataclasses.dataclass
class Live:
    """A running server."""

    engine: Engine
    tokenizer: Tokenizer
    base: str

    def client(self) -> openai.OpenAI:
        """A client that reports every failure."""
        return openai.OpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=0, timeout=60)

    def wait_idle(self, seconds: float) -> None:
        """Waits until no request holds anything, for at most so long."""
        deadline = time.monotonic() + seconds
        while not self.idle and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.idle, self.engine.snapshot()

    @property
    def idle(self) -> bool:
        now = self.engine.snapshot()
        return now.running + now.waiting + now.queued == 0 and now.pages_free == now.pages_total


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and some more."""
    backend = byte_level_bpe(TOKENS, [], pre="gpt-2", special=SPECIAL)
    return Tokenizer(backend, eos_ids=frozenset({EOS}), eos_token="<eos>", chat_template=TEMPLATE)


@contextmanager
def serving(engine: Engine, *, admin: bool = False) -> Iterator[Live]:
    """A server for a started engine."""
    tokenizer, listening, sock = byte_tokenizer(), threading.Event(), bind("127.0.0.1", 0)
    base = url(sock)
    server = Server(create_app(engine, tokenizer, "tiny", admin=admin), engine, listening.set, lambda line: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        assert listening.wait(30)
        yield Live(engine, tokenizer, base)
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()
    assert not engine.accepting


@pytest.fixture(scope="session")
def shared() -> Iterator[Live]:
    """One server for most tests."""
    engine = Engine(tiny_model(), ENGINE)
    engine.start()
    with serving(engine, admin=True) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The shared server, idle before the test and after it."""
    shared.wait_idle(10)
    yield shared
    shared.wait_idle(10)


@pytest.fixture(scope="session")
def serve() -> Callable[[Engine], AbstractContextManager[Live]]:
    """To run a server for another engine."""
    return serving


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    directory.mkdir()
    config = dataclasses.replace(TINY, max_position_embeddings=8192)
    raw = dataclasses.asdict(config) | {"architectures": ["LlamaForCausalLM"], "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(raw))
    byte_tokenizer().backend.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(shape, np.float32) * 0.3 for name, shape in tensor_shapes(config)}
    save_file({n: w.astype(np.float32) for n, w in weights.items()}, directory / "model.safetensors")
    return directory
