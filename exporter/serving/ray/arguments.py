"""Arguments of the application: ``args`` in serve.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from linexport.artifact.signature import Trust
from linexport.errors import UsageError
from linexport.serving.limits import LEAST, Limits


class Arguments(BaseModel):
    """Options of the application, in addition to every field of ``Limits``.

    Attributes:
        artifact: folder of it, at the same path on every node.
        name: of the model; None for that of the folder.
        threads: of a model's process, which takes as many of Ray's CPUs.
        min_replicas: models that always run.
        max_replicas: models that run when requests wait.
        token_file: of the bearer token that clients must send.
        hosts: names by which the server is called, besides those of its own machine; ``*``: any.
            With a token, any.
        park: folder of parked sequences.
        key: public key, or folder of such keys, of those whose artifacts are opened; None for
            anybody's.
        newer_than: with a key: a time after which the artifact must have been signed.
        limits: those of slots, queues and memory are of one replica.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    artifact: Path
    name: str | None = None
    threads: int = Field(1, ge=1)
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(4, ge=1)
    token_file: Path | None = None
    hosts: tuple[str, ...] = ()
    park: Path | None = None
    key: Path | None = None
    newer_than: str | None = None
    limits: Limits = Limits()

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Arguments:
        """Return the arguments in a mapping of their names.

        Raises:
            UsageError: one is missing, unknown or not such a value.
        """
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, first["loc"])) or "args"
        raise UsageError(f"{name}: {first['msg']}; found {first['input']!r}.")

    @property
    def trust(self) -> Trust | None:
        """Return whose artifacts are opened."""
        return None if self.key is None else Trust(self.key.absolute(), self.newer_than)

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: object) -> object:
        """Put limits that are named as arguments into ``limits``."""
        names = {field.name for field in fields(Limits)}
        if not isinstance(given, dict) or not names & given.keys():
            return given
        limits = {name: given[name] for name in names & given.keys()}
        return {**{n: v for n, v in given.items() if n not in names}, "limits": limits}

    @model_validator(mode="after")
    def _check(self) -> Arguments:
        for field in fields(Limits):
            found, least = getattr(self.limits, field.name), field.metadata[LEAST]
            if found < least:
                raise ValueError(f"{field.name} is {found}; expected {least} or more")
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; expected min_replicas, {self.min_replicas}, "
                "or more"
            )
        return self
