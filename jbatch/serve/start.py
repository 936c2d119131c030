"""From a configuration to a running server."""

from __future__ import annotations

import socket
from collections.abc import Callable

import jax

from jbatch.config import UserError
from jbatch.core.model import Model
from jbatch.engine import Engine
from jbatch.models.load import load_model
from jbatch.serve.app import create_app
from jbatch.serve.config import ServeConfig
from jbatch.serve.server import Server
from jbatch.serve.sockets import cannot_listen, url


def run(config: ServeConfig, sock: socket.socket, report: Callable[[str], None]) -> None:
    """Loads, compiles, and serves on a bound socket until a signal ends it. Raises `UserError`."""
    report(f"load: {config.model} as {config.dtype}")
    loaded = load_model(config.model, dtype=config.dtype, report=report)
    engine = _started(config, loaded.for_engine(), report)
    name = config.served_model_name or loaded.name

    def ready() -> None:
        report(f"ready: {name} at {url(sock)}/v1")
        report(f"try: {_example(url(sock))}")

    server = Server(create_app(engine, loaded.tokenizer, name, admin=config.admin), engine, ready, report)
    try:
        server.run(sockets=[sock])
    except OSError as error:  # another process began to listen since `bind`
        raise cannot_listen(config.host, config.port, error) from None
    finally:
        engine.stop(drain=False)


def _started(config: ServeConfig, model: Model, report: Callable[[str], None]) -> Engine:
    try:
        engine = Engine(model, config.engine, report, controls=config.controls, record=config.record)
        engine.start()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the device cannot hold this engine ({reason}): lower --num-pages, now {config.engine.num_pages}"
        ) from None
    return engine


def _example(base: str) -> str:
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    return f"curl {base}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
