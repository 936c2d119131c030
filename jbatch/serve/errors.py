"""Errors as OpenAI words them: every 4xx and 5xx carries the same JSON object."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from jbatch.request import DeadlineError, EngineStoppedError, QueueFullError, RequestError

RETRY_SECONDS = 5
"""Hint to clients of a server that takes no more requests: another may take its place."""


class ApiError(Exception):
    """An HTTP status with OpenAI's error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = {
            "error": {
                "message": message,
                "type": "server_error" if status >= 500 else "invalid_request_error",
                "param": param,
                "code": code,
            }
        }


def describe(error: Exception) -> ApiError:
    """The error as clients are told of it."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return ApiError(400, str(error), param=error.param)
        case QueueFullError():
            return _unavailable(str(error), "queue_full", error.retry_after)
        case DeadlineError():
            return _unavailable(str(error), "deadline", math.ceil(min(60.0, max(1.0, error.wait))))
        case EngineStoppedError():
            return _unavailable(str(error), "stopping", RETRY_SECONDS)
        case RequestValidationError():
            return _invalid(error.errors()[0])
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
        case _:
            return ApiError(500, "the server failed to answer this request; its log says why")


def install(app: FastAPI) -> None:
    """Makes every error of `app` one of ours."""
    ours = (ApiError, RequestError, QueueFullError, DeadlineError, EngineStoppedError)
    for kind in (*ours, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _respond)


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = HTTPException(error.status_code, f"{error.detail}: {request.method} {request.url.path}", error.headers)
    told = describe(error)
    body = json.dumps(told.body).encode()  # ASCII: a message may quote half of a surrogate pair
    return Response(body, told.status, told.headers, media_type="application/json")


def _unavailable(message: str, code: str, retry_after: int) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def _invalid(problem: dict[str, Any]) -> ApiError:
    """From the first problem that pydantic found in a body."""
    if problem["type"] == "json_invalid":
        at = problem["loc"][-1]
        return ApiError(400, f"the body is not valid JSON: {problem['ctx']['error']}, at character {at}")
    where = ".".join(str(part) for part in problem["loc"][1:])
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return ApiError(400, str(cause), param=cause.param)
    message = str(cause) if isinstance(cause, ValueError) else problem["msg"]
    return ApiError(400, f"{where or 'the body'}: {message}", param=where or None)
