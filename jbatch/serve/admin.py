"""GET and PATCH /admin/controls: how the engine works, while it does. Only where the server is told to serve them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from jbatch.config import UserError
from jbatch.controls import Controls
from jbatch.serve.errors import ApiError
from jbatch.serve.service import Service

_CONTROLS = TypeAdapter(Controls)

router = APIRouter()


@router.get("/admin/controls")
async def controls(http: Request) -> dict[str, Any]:
    """The controls in force."""
    return asdict(Service.of(http).engine.controls)


@router.patch("/admin/controls")
async def change_controls(http: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Changes the controls that the body names, all or none, from the next step on. Answers as GET does afterwards."""
    engine = Service.of(http).engine
    try:
        engine.set_controls(_changed(engine.controls, body))
    except UserError as error:
        raise ApiError(400, str(error)) from None
    return asdict(engine.controls)


def _changed(now: Controls, changes: dict[str, Any]) -> Controls:
    """Raises `UserError`, `ApiError` or `RequestValidationError` where the changes make no sense."""
    fields = asdict(now)
    for name in changes:
        if name not in fields:
            raise ApiError(400, f"there is no control {name!r}: there are {', '.join(fields)}", param=name)
    try:  # as JSON, in which a list is right for a tuple even where types are strict
        return _CONTROLS.validate_json(json.dumps({**fields, **changes}, ensure_ascii=False), strict=True)
    except ValidationError as error:
        raise RequestValidationError([{**found, "loc": ("body", *found["loc"])} for found in error.errors()]) from None
