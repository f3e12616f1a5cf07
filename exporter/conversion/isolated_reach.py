"""Reach of an isolated conversion into its host: variables of the environment, and files."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

import linexport
from linexport.errors import UsageError
from linexport.sources import is_factory
from linexport.sources.callables import code_folders
from linexport.sources.detect import Kind, recognise
from linexport.sources.hugging_face.lora import model_folder

VARIABLES = re.compile(
    "PATH|HOME|USER|LOGNAME|TZ|LANG|LANGUAGE|LC_[A-Z]+|LD_LIBRARY_PATH|VIRTUAL_ENV|"
    "PYTHON(HOME|HASHSEED|UTF8|IOENCODING|NOUSERSITE|WARNINGS|DONTWRITEBYTECODE)|"
    "[A-Z]+_NUM_THREADS|MKL_[A-Z_]+|KMP_[A-Z_]+|OMP_[A-Z_]+|CUDA_VISIBLE_DEVICES|"
    "HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
)
"""Names of variables that are passed on: those that say how to run, none that may be a secret."""

WITHIN = ("HF_HOME", "HF_MODULES_CACHE", "TMPDIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
"""Variables that name folders to write to: all become the temporary one."""

SYSTEM = (
    *("/bin", "/lib", "/lib32", "/lib64", "/sbin", "/usr", "/nix/store", "/proc", "/sys"),
    *("/dev/random", "/dev/urandom", "/dev/zero"),
    *(
        "/etc/alternatives",
        "/etc/fonts",
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
    ),
    *("/etc/group", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/timezone"),
)
"""Files and folders that libraries read wherever they run."""


def environment(temporary: Path) -> dict[str, str]:
    """Return the variables of the child."""
    return {
        **{name: value for name, value in os.environ.items() if VARIABLES.fullmatch(name)},
        **dict.fromkeys(WITHIN, str(temporary)),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def readable(source: str, weights: str | None = None) -> list[str]:
    """Return files and folders: the system's libraries, Python's, linexport's, and the model.

    Args:
        source: of the conversion.
        weights: file of weights that go with it.
    """
    paths = sysconfig.get_paths().values()
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    own = [*linexport.__path__, *_installed_in_place()]
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix)
    model = [*_model(source), *([] if weights is None else [str(Path(weights).resolve())])]
    found = [*SYSTEM, *prefixes, *paths, *sys.path, *libraries, *own, *model]
    return list(dict.fromkeys(path for path in found if path))


def _installed_in_place() -> Iterator[str]:
    """Yield folders of packages that are installed where their source is."""
    for one in metadata.distributions():
        text = one.read_text("direct_url.json")
        described = json.loads(text) if text else {}
        if described.get("dir_info", {}).get("editable"):
            yield unquote(urlsplit(described["url"]).path)


def _model(source: str) -> list[str]:
    """Return the places of a model: of code the folders that its module may be in."""
    path = Path(source)
    if not path.exists():
        return code_folders(source) if is_factory(source) else []
    if path.is_dir():
        whole = path.resolve()
        base = model_folder(path)
        # Files of a snapshot in the Hugging Face cache are links to its blobs folder.
        blobs = [whole.parent.parent / "blobs"] if whole.parent.name == "snapshots" else []
        others = [] if base == path else _model(str(base))
        return [*(str(place) for place in (whole, *blobs)), *others]
    try:
        has_data = recognise(path) is Kind.ONNX  # its weights may be in files of the folder
    except UsageError:
        has_data = False
    return [str(path.resolve().parent if has_data else path.resolve())]
