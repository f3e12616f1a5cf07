"""The Open Inference Protocol, version 2: any model, whole sequences or piece by piece.

no sequence_id                        a call of its own, of any batch
sequence_id, sequence_start           takes a slot, and keeps the state for
sequence_id                           the next piece, and so on until
sequence_id, sequence_end             the last one, which frees the slot
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from linexport import __version__
from linexport.serving.http.attend import attended
from linexport.serving.http.budget import READ, Charge
from linexport.serving.http.call_cost import call_cost
from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.tensors import (
    DATATYPES,
    JSON_LENGTH,
    InferRequest,
    answer,
    read,
    shape_of,
)
from linexport.serving.sequence import Outputs
from linexport.serving.service import Service

VERSION = "1"


async def server(request: Request) -> Response:
    """Describe the server."""
    extensions = ["binary_tensor_data", "sequence"]
    return JSONResponse({"name": "linexport", "version": __version__, "extensions": extensions})


async def metadata(request: Request) -> Response:
    """Describe the model."""
    service = _service(request)
    manifest = service.manifest
    held = {name for s in manifest.states for name in (s.past, s.present)}
    return JSONResponse(
        {
            "name": service.name,
            "versions": [VERSION],
            "platform": f"linexport_{manifest.target}",
            "inputs": [_described(i) for i in manifest.inputs if i.name not in held],
            "outputs": [_described(o) for o in manifest.outputs if o.name not in held],
        }
    )


async def ready(request: Request) -> Response:
    """Answer whether the model takes requests."""
    return Response(status_code=200 if _service(request).ready else 503)


async def infer(request: Request) -> Response:
    """Run the model."""
    service, desk = _service(request), request.app.desk
    charge: Charge = request.scope["charge"]
    if not service.ready:
        raise ProtocolError(503, "The server is shutting down.")
    body = await request.body()
    charge.take(READ * len(body), "what is read of its body")
    infer_request, feeds = await desk.do(len(body), read, body, request.headers.get(JSON_LENGTH))
    _check_size(service, feeds)
    name = _sequence(infer_request)
    inside = await desk.do(None, service.memory.bytes, feeds) if name is None else 0
    cost = call_cost(service.manifest, infer_request, feeds, inside)
    if cost.answer > service.limits.max_answer:
        raise ProtocolError(
            413,
            f"The answer would have up to {cost.answer:,} bytes; this server sends at most "
            f"{service.limits.max_answer:,} (--max-answer). Send fewer tokens, name the outputs "
            "that you need, or ask for binary_data.",
            code="answer_too_large",
        )
    charge.take(cost.answer, "the answer")
    charge.take(cost.call, "what the model computes")
    if name is None:
        outputs = await attended(request, service.computing.run(feeds))
    else:
        outputs = await _piece(request, service, infer_request, feeds, name)
    size = sum(values.nbytes for values in outputs.values())
    response: Response = await desk.do(size, answer, infer_request, service.name, outputs)
    return response


def _service(request: Request) -> Service:
    service: Service = request.app.service
    name = request.path_params.get("name", service.name)
    version = request.path_params.get("version", VERSION)
    if (name, version) != (service.name, VERSION):
        raise ProtocolError(404, f"Found model {name}/{version}; this server has {service.name}/1.")
    return service


def _described(tensor: Any) -> dict[str, object]:
    datatype = DATATYPES.get(tensor.dtype, tensor.dtype)
    return {"name": tensor.name, "datatype": datatype, "shape": shape_of(tensor.shape)}


def _check_size(service: Service, feeds: dict[str, np.ndarray]) -> None:
    """Refuse calls of a model of sequences that are longer than its prompts may be."""
    manifest, most = service.manifest, service.limits.max_prompt
    if not manifest.states:
        return
    for described in manifest.inputs:
        values = feeds.get(described.name)
        if values is None or values.ndim != len(described.shape):
            continue
        pairs = zip(values.shape, described.shape, strict=True)
        tokens = prod(size for size, dim in pairs if not isinstance(dim, int))
        if tokens > most:
            raise ProtocolError(
                400, f"{described.name} has {tokens} tokens; this server takes {most} at most."
            )


def _sequence(infer_request: InferRequest) -> str | None:
    found = infer_request.parameters.get("sequence_id", 0)
    if type(found) not in (int, str):
        raise ProtocolError(400, f"sequence_id is {found!r}; expected an integer or a text.")
    return repr(found) if found else None


async def _piece(
    request: Request,
    service: Service,
    infer_request: InferRequest,
    feeds: dict[str, np.ndarray],
    name: str,
) -> Outputs:
    """Run the next piece of a sequence."""
    starts, ends = (bool(infer_request.parameters.get(f"sequence_{at}")) for at in ("start", "end"))
    return await attended(request, service.computing.piece(feeds, name, starts, ends))


MODEL = "/v2/models/{name}"
ROUTES = [
    Route("/v2", server),
    Route("/v2/health/ready", ready),
    *(
        Route(f"{base}{path}", handler, methods=methods)
        for base in (MODEL, f"{MODEL}/versions/{{version}}")
        for path, handler, methods in (
            ("", metadata, ["GET"]),
            ("/ready", ready, ["GET"]),
            ("/infer", infer, ["POST"]),
        )
    ),
]
