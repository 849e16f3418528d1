"""``GET /v1/models`` and ``/v1/models/{id}``."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request, Response

from common.errors import RequestError
from gateway.protocols.common import Deps


async def list_models(_: Request, deps: Deps) -> Response:
    """The served names."""
    return _json({"object": "list", "data": [_card(name, deps) for name in deps.served]})


async def get_model(request: Request, deps: Deps) -> Response:
    """One served name."""
    name = request.path_params["model"]
    if name not in deps.served:
        raise RequestError(f"the model {name!r} does not exist here", status=404, param="model", code="model_not_found")
    return _json(_card(name, deps))


def _card(name: str, deps: Deps) -> dict[str, Any]:
    model = deps.engine.model
    return {
        "id": name,
        "object": "model",
        "created": int(deps.started),
        "owned_by": "quintet",
        "root": deps.served[0],
        "max_model_len": model.context_len if model is not None else None,
    }


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
