"""A server on a Ray cluster: ``serve run linexport.serving.ray:app artifact=FOLDER``.

    client -> Ray's HTTP proxy -> Gateway -> consistent hash of the session -> Model, Model, ...

The gateway speaks the protocols and keeps, of every text in progress, its tokens. A model holds the
artifact and a pool. When one dies or is taken away, the gateway has the rest of its texts written
by another, from their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from linexport.errors import EnvironmentProblemError
from linexport.serving.ray.arguments import Arguments
from linexport.system.install import pip_install_here

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["Arguments", "app"]


def app(args: Mapping[str, object]) -> Application:
    """Return the application that Ray Serve runs; the ``import_path`` of a serve.yaml.

    Args:
        args: see ``Arguments``.

    Raises:
        UsageError: an argument is wrong, or the folder is not an artifact.
        EnvironmentProblemError: Ray is not installed.
    """
    arguments = Arguments.read(args)
    try:
        from linexport.serving.ray.deployments import application
    except ImportError as error:
        raise EnvironmentProblemError(
            f"Serving on Ray needs {error.name}: {pip_install_here('ray')}."
        ) from None
    return application(arguments)
