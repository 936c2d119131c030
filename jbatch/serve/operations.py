"""GET /v1/models, /health and /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from jbatch.request import EngineStoppedError
from jbatch.serve.schemas import ModelCard, ModelList
from jbatch.serve.service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(http: Request) -> ModelList:
    """The models that can be asked for."""
    return ModelList(data=[Service.of(http).card])


@router.get("/v1/models/{name:path}")
async def model(http: Request, name: str) -> ModelCard:
    """One model."""
    service = Service.of(http)
    service.check_model(name)
    return service.card


@router.get("/health")
async def health(http: Request) -> dict[str, str]:
    """Whether the server takes requests: 200, or 503."""
    if not Service.of(http).engine.accepting:
        raise EngineStoppedError("the engine takes no requests: it is stopping, or it has failed")
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Metrics for Prometheus."""
    return Response(Service.of(http).metrics.render(), media_type=CONTENT_TYPE_LATEST)
