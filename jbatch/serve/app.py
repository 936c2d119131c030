"""The HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from jbatch import __version__
from jbatch.engine import Engine
from jbatch.serve import admin as admin_routes
from jbatch.serve import chat, completions, errors, operations
from jbatch.serve.limits import BodyLimit
from jbatch.serve.service import Service
from jbatch.tokenizer import Tokenizer


def create_app(engine: Engine, tokenizer: Tokenizer, name: str, *, admin: bool = False) -> FastAPI:
    """An OpenAI-compatible API for a started engine, which it stops when it ends. Clients call the model `name`.

    With `admin`, clients may also read and change its controls.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(engine, tokenizer, name)
        yield
        # Every connection is closed by now. In a thread, since the engine still reports to this loop.
        await asyncio.to_thread(engine.stop, drain=False)

    app = FastAPI(title="jbatch", version=__version__, lifespan=lifespan)
    errors.install(app)
    app.add_middleware(BodyLimit)
    for module in (chat, completions, operations):
        app.include_router(module.router)
    if admin:
        app.include_router(admin_routes.router)
    return app
