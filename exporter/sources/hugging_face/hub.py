"""Models of the Hugging Face hub by name, in the cache of huggingface_hub.

    org/model             the revision that main was when it was fetched
    org/model@REVISION    that one: a commit, a branch or a tag

Only data is fetched: configurations, tokenizers and safetensors at the top of a repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.manifest import LANGUAGE_FILES
from linexport.manifest.file_names import PROCESSOR_FILES
from linexport.sources.files import first_line
from linexport.sources.hugging_face.folder import ADAPTER, CONFIG, INDEX, WEIGHTS, missing

ADAPTER_WEIGHTS = "adapter_model.safetensors"
HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w-][\w./-]*))?")
FETCHED = (
    *(CONFIG, INDEX, ADAPTER, "modules.json", "*.safetensors"),
    *LANGUAGE_FILES,
    *PROCESSOR_FILES,
)
"""Patterns of the files that are fetched."""
LEFT = ("*/*", "consolidated*")
"""Patterns of those that are not, though the others match: in folders, and a second copy."""

_COMMIT = re.compile(r"[0-9a-f]{40}")

S = TypeVar("S")


def is_hub_name(source: object) -> bool:
    """Return whether a source that is not a path names a model of the hub."""
    return isinstance(source, str) and HUB_NAME.fullmatch(source) is not None


def resolved(source: S, download: bool, revision: str | None, as_folder: bool) -> S | str:
    """Return a source whose files are on this machine, with the revision in its name.

    Args:
        source: of a conversion.
        download: fetch it, if it names a model of the hub.
        revision: of it; None for main.
        as_folder: give the folder in the cache, for a process that has no cache.

    Raises:
        UsageError: the options are not for this source, or the model or revision does not exist.
        UnsupportedModelError: the model has no weights that are data.
        EnvironmentProblemError: the hub cannot be reached, or huggingface_hub is missing.
    """
    found = HUB_NAME.fullmatch(source) if isinstance(source, str) else None
    if found is None or Path(found[0]).exists():
        if download or revision is not None:
            flag = "--download" if download else "--revision"
            raise UsageError(
                f"{flag} is for a model of the Hugging Face hub, such as org/model; {source} is "
                "not the name of one, or a file or folder here. Leave it out."
            )
        return source
    if revision is not None and found["revision"] not in (None, revision):
        raise UsageError(f"--revision {revision} and {source} name two revisions. Give one.")
    chosen = revision or found["revision"]
    name = f"{found['name']}@{chosen}" if chosen else found["name"]
    if download:
        name = _fetched(found["name"], chosen)
    return str(cached_folder(name)) if as_folder else name


def cached_folder(name: str) -> Path:
    """The folder in which an earlier download put a model of the hub.

    Raises:
        UsageError: the model was not downloaded; nothing is downloaded here.
    """
    found = HUB_NAME.fullmatch(name)
    repository, revision = (found["name"], found["revision"]) if found else (name, None)
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            repository,
            revision=revision,
            local_files_only=True,
            allow_patterns=list(FETCHED),
            ignore_patterns=list(LEFT),
        )
        return Path(folder)
    except (ImportError, ValueError, OSError):
        raise UsageError(
            f"There is no file or folder {name}, and no model of that name in the Hugging Face "
            "cache. Nothing is fetched unless you say so: pass --download to linexport convert, or "
            f"run `hf download {repository}`."
        ) from None


def pinned(name: str, folder: Path) -> str:
    """Return the name of a model in the cache with the commit whose files a folder has."""
    found = HUB_NAME.fullmatch(name)
    commit = folder.name
    return f"{found['name']}@{commit}" if found and _COMMIT.fullmatch(commit) else name


def _fetched(name: str, revision: str | None) -> str:
    """Fetch the files of a model that are data; return its name with the commit."""
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError as error:
        raise missing(error) from None
    with _explained(name, revision):
        info = HfApi().model_info(name, revision=revision)
        _check_weights(name, [sibling.rfilename for sibling in info.siblings or []])
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(FETCHED),
            ignore_patterns=list(LEFT),
            library_name="linexport",
        )
    return pinned(name, Path(folder))


def _check_weights(name: str, files: list[str]) -> None:
    """Refuse a model whose weights would not be read, before gigabytes of it are fetched.

    Raises:
        UnsupportedModelError: it has no safetensors where they are looked for.
    """
    if not {WEIGHTS, INDEX, ADAPTER_WEIGHTS} & set(files):
        pickled = any(file.endswith((".bin", ".pt", ".pth", ".ckpt")) for file in files)
        raise UnsupportedModelError(
            f"{name} has no {WEIGHTS}, nor {INDEX}"
            + (": its weights are pickles, which can run code when opened" if pickled else "")
            + ". Nothing was fetched. Take a revision or a repository with safetensors."
        )


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Raise errors of huggingface_hub as those of linexport."""
    from huggingface_hub import constants, errors

    # With the errors of its client of HTTP, whose package depends on the release.
    others = tuple(
        kind
        for kind in (ValueError, *errors.HfHubHTTPError.__mro__)
        if issubclass(kind, Exception) and kind is not Exception
    )
    try:
        yield
    except errors.GatedRepoError:
        raise UsageError(
            f"{name} is open to those who accept its conditions. Accept them on its page, and log "
            "in by `hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"The hub has no model {name}, or it is private. Check the name, or log in by "
            "`hf auth login`."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{name} has no revision {revision}; give a commit, branch or tag."
        ) from None
    except errors.OfflineModeIsEnabled:
        raise EnvironmentProblemError(
            "HF_HUB_OFFLINE is set, so nothing is fetched. Unset it, or leave --download out."
        ) from None
    except others as error:
        raise EnvironmentProblemError(
            f"{name} could not be fetched from {constants.ENDPOINT}: {first_line(error)}. What is "
            "complete is kept: run the command again."
        ) from None
