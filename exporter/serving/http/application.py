"""The application: routes of all protocols, behind the guards and the access log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from linexport.serving.http import embeddings, inference, openai
from linexport.serving.http.access_log import AccessLog
from linexport.serving.http.budget import MIB, Budget
from linexport.serving.http.desk import Desk
from linexport.serving.http.guards import Guards, Rules
from linexport.serving.service import Service

PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Application:
    """An ASGI application.

    Args:
        service: what it serves.
        rules: what it lets through.
    """

    def __init__(self, service: Service, rules: Rules) -> None:
        self.service = service
        self.desk = Desk()
        self.budget = Budget(service.limits.memory_mib * MIB)

        @asynccontextmanager
        async def lifespan(_: object) -> AsyncIterator[None]:
            service.start()
            yield
            await service.close()
            self.desk.close()

        router = Router(ROUTES, lifespan=lifespan, redirect_slashes=False)
        requests = service.metrics.requests
        guards = Guards(router, rules, self.budget)
        self._outer = AccessLog(guards, lambda path, status: requests.labels(path, status).inc())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope["app"] = self
        await self._outer(scope, receive, send)


async def page(request: Request) -> Response:
    """Return the page for people."""
    headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
    return Response(_page(), headers=headers, media_type="text/html")


async def live(request: Request) -> Response:
    """Answer that the process runs."""
    return JSONResponse({"status": "live"})


async def ready(request: Request) -> Response:
    """Answer whether requests are taken."""
    is_ready = request.app.service.ready
    return JSONResponse({"status": "ready" if is_ready else "stopping"}, 200 if is_ready else 503)


async def metrics(request: Request) -> Response:
    """Return what Prometheus reads."""
    return Response(request.app.service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@cache
def _page() -> bytes:
    return Path(__file__).with_name("page.html").read_bytes()


ROUTES = [
    Route("/", page),
    Route("/health/live", live),
    Route("/health/ready", ready),
    Route("/v2/health/live", live),
    Route("/metrics", metrics),
    *openai.ROUTES,
    *embeddings.ROUTES,
    *inference.ROUTES,
]
