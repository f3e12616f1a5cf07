"""The two deployments: one that speaks with clients, one that computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from linexport import manifest as manifests
from linexport.artifact.checked import checked_artifact
from linexport.artifact.signature import Trust
from linexport.manifest import Manifest
from linexport.manifest.records import FileRecord
from linexport.serving.http.application import Application
from linexport.serving.http.guards import LOCAL, Rules
from linexport.serving.ray.arguments import Arguments
from linexport.serving.ray.model import ReplicaModel
from linexport.serving.ray.remote import SESSION, Remote
from linexport.serving.service import Service
from linexport.serving.token import read_token

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
HEADER = "x-session-id"
"""Header by which a client names its session: that of Ray's router."""

ANY = "*"


@dataclass(frozen=True)
class Folder:
    """An artifact's folder, opened without the model."""

    path: Path
    manifest: Manifest
    verified: Mapping[str, FileRecord]

    @classmethod
    def open(cls, path: Path, trust: Trust | None) -> Folder:
        """Return a folder whose files were verified.

        Raises:
            UsageError: not an artifact, or one that is damaged.
            SignatureError: it is not as one who is trusted signed it.
        """
        manifest = checked_artifact(path, trust).manifest
        return cls(path, manifest, manifest.files)


@serve.ingress()
class Gateway:
    """Speaks the protocols; holds no weights.

    Args:
        models: the deployment that computes.
        arguments: of the application.
        token: that clients must send.
    """

    def __init__(self, models: DeploymentHandle, arguments: Arguments, token: str | None) -> None:
        limits = arguments.limits
        service = Service(
            Folder.open(arguments.artifact, arguments.trust),
            Remote(models, limits),
            arguments.name or arguments.artifact.resolve().name,
            limits,
            arguments.park,
        )
        hosts = None
        if token is None and ANY not in arguments.hosts:
            hosts = frozenset({*LOCAL, *arguments.hosts})
        rules = Rules(token, hosts, limits.max_body, limits.request_seconds)
        self._application = Application(service, rules)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _with_session(self._application)


def _with_session(inner: ASGIApp) -> ASGIApp:
    """Note the session of each request."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            SESSION.set(Headers(scope=scope).get(HEADER, ""))
        await inner(scope, receive, send)

    return answer


def application(arguments: Arguments) -> serve.Application:
    """Return the application; its options are those of serve.yaml where that has others.

    Raises:
        UsageError: the folder is not an artifact.
    """
    folder = arguments.artifact.absolute()
    manifests.read(folder)
    arguments = arguments.model_copy(update={"artifact": folder})
    limits = arguments.limits
    models = serve.deployment(
        ReplicaModel,
        name="Model",
        max_ongoing_requests=limits.slots,
        max_queued_requests=limits.queue,
        autoscaling_config=AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=limits.slots,
        ),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        ray_actor_options={"num_cpus": arguments.threads},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=limits.grace_seconds,
    )
    gateway = serve.deployment(
        Gateway,
        name="Gateway",
        max_ongoing_requests=limits.connections,
        # It waits for the models most of the time: CPUs are theirs.
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=limits.grace_seconds,
    )
    token = None if arguments.token_file is None else read_token(arguments.token_file)
    model = models.bind(folder, arguments.threads, limits, arguments.trust)
    return gateway.bind(model, arguments, token)
