"""Stage `load`: a path, ``package.module:callable`` or an object becomes a LoadedModel.

One file or folder per input kind: `checkpoint`, `exported_program`, `onnx_file`, `hugging_face`,
`diffusers`, `factory`, `objects`; everything else is recognised by its content in `recognise` and
refused with advice in `refuse`. No file is ever unpickled in a way that can run code from it, and
torch is imported only once a file deserves it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import UsageError
from linexport.sources.files import check_text
from linexport.sources.loaded_model import LoadedModel, Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LoadedModel", "Source", "is_factory", "load_model"]

log = logging.getLogger(__name__)

_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def load_model(
    source: object,
    *,
    seed: int = 0,
    trust_remote_code: bool = False,
    run: bool = True,
    whole: bool = False,
    pooling: str | None = None,
    vision: bool = True,
    mtp: bool = True,
    state_dict: str | Path | None = None,
    inputs: Iterable[str] = (),
    examples: tuple[Tensor, ...] = (),
    stand_ins: bool = False,
) -> LoadedModel:
    """Load a model from a file, or from a function that builds it.

    Args:
        source: path of a linexport checkpoint (``.pt``), of an exported program (``.pt2``) or of
            an ONNX file, of a Hugging Face model folder, of a model folder of diffusers or of an
            adapter of peft's; the name of a model in the Hugging Face cache, org/model or
            org/model@REVISION; or ``package.module:callable`` or ``file.py:Class`` naming a
            function or a class, see ``factory``; or an object, see ``objects``. The content of a
            file decides its kind, not the name. A model that is loaded is returned as it is.
        seed: seed of the example inputs and of any weights a factory draws.
        trust_remote_code: run Python code that a model folder brings along.
        run: the module is to be run; else an ONNX file may have operators that nobody here knows.
        whole: a model of transformers of any kind as one plain module that is called once for a
            whole sequence; else as a causal model that carries states.
        pooling: of the hidden states of a Hugging Face model without a head: "mean", "last" or
            "cls"; None gives all of them.
        vision: take the vision tower of a Hugging Face model as well, where it is one that is
            converted.
        mtp: take the head for multi-token prediction of such a model as well, where it has one.
        state_dict: file of weights for the module of a function or class.
        inputs: example inputs of such a module, ``NAME=DTYPE[SIZES]``.
        examples: tensors that such a module runs on, in order, where ``inputs`` are not given; of
            no effect on other sources, which say themselves how they are called.
        stand_ins: make packages of GPU libraries that code of a function or class imports and that
            are not installed.

    Returns:
        The module in inference mode, with example inputs, dynamic dims and provenance.

    Raises:
        UsageError: nothing is there, it cannot be read, the factory cannot be found or fails, or
            a pooling for something else than hidden states.
        UnsupportedModelError: the file is damaged, unsafe, or of a kind linexport does not read.
    """
    if isinstance(source, LoadedModel):
        return source
    if not isinstance(source, str | Path):
        _check_unpooled(type(source).__name__, pooling)
        _check_own(type(source).__name__, state_dict, inputs, stand_ins)
        from linexport.sources.objects import load_object

        return load_object(source, seed=seed, whole=whole)
    check_text(source)
    path = Path(source)
    options = {
        "trust_remote_code": trust_remote_code,
        "pooling": pooling,
        "vision": vision,
        "mtp": mtp,
    }
    if not _exists(path):
        if is_factory(source):
            _check_unpooled(source, pooling)
            from linexport.sources.factory import load_factory

            return load_factory(
                str(source),
                seed=seed,
                whole=whole,
                state_dict=state_dict,
                inputs=inputs,
                examples=examples,
                stand_ins=stand_ins,
            )
        _check_own(source, state_dict, inputs, stand_ins)
        from linexport.sources.hugging_face.hub import cached_folder, is_hub_name, pinned

        if is_hub_name(source):
            folder = cached_folder(str(source))
            return _hugging_face(folder, pinned(str(source), folder), whole, **options)
        raise UsageError(
            f"no file or folder {source}. Expected a linexport checkpoint (.pt), an exported "
            "program (.pt2), an ONNX file, or file.py:Class or package.module:function, which name "
            "code of yours."
        )
    _check_own(source, state_dict, inputs, stand_ins)

    from linexport.sources.detect import Kind, recognise

    kind = recognise(path)
    log.info("%s is taken for: %s", path, kind.name.lower().replace("_", " "))
    if kind in (Kind.HUGGING_FACE_FOLDER, Kind.ADAPTER_FOLDER):
        return _hugging_face(path, str(path), whole, **options)
    if kind in (Kind.GGUF, Kind.GGUF_FOLDER) and not whole:
        from linexport.sources.gguf import gguf_in, load_gguf

        return load_gguf(gguf_in(path), location=str(path), **options)
    _check_unpooled(source, pooling)
    if kind is Kind.DIFFUSERS_FOLDER:
        from linexport.sources.diffusers import load_diffusers

        return load_diffusers(path)
    if kind is Kind.EXPORTED_PROGRAM:
        from linexport.sources.exported_program import load_exported_program

        return load_exported_program(path)
    if kind is Kind.TORCH_ZIP:
        from linexport.sources.checkpoint import load_checkpoint_file

        return load_checkpoint_file(path, seed=seed)
    if kind is Kind.ONNX:
        from linexport.sources.onnx_file import load_onnx_file

        return load_onnx_file(path, seed=seed, run=run)

    from linexport.sources.refuse import refusal

    raise refusal(path, kind)


def is_factory(source: str | Path) -> bool:
    """Return whether ``load_model`` takes the source for code: no path, and it has a colon.

    Raises:
        UsageError: it is no text that a path could be.
    """
    named = isinstance(source, str) and ":" in _WINDOWS_DRIVE.sub("", source, count=1)
    return named and not _exists(Path(source))


def _check_own(
    source: str | Path, state_dict: str | Path | None, inputs: Iterable[str], stand_ins: bool
) -> None:
    """Refuse what goes with code of the user's where another source is given.

    Raises:
        UsageError: one of them is given.
    """
    flag = "--state-dict" if state_dict is not None else "--input" if tuple(inputs) else None
    if flag:
        raise UsageError(
            f"{flag} goes with a class or a function of yours, file.py:Class; {source} brings its "
            "weights and inputs itself. Leave it out."
        )
    if stand_ins:
        raise UsageError(
            f"--stand-ins goes with a class or a function of yours, file.py:Class, whose code "
            f"imports GPU libraries; {source} is none. Leave it out."
        )


def _check_unpooled(source: str | Path, pooling: str | None) -> None:
    if pooling is not None:
        raise UsageError(
            f"--pooling is for a base model in a Hugging Face folder; {source} is none. Leave it "
            "out, or pool in the model itself."
        )


def _hugging_face(folder: Path, location: str, whole: bool, **options: Any) -> LoadedModel:
    from linexport.sources.hugging_face import load_adapter, load_hugging_face

    adapted = not any((folder / name).exists() for name in ("config.json", "modules.json"))
    if whole and adapted:
        raise UsageError(
            f"{folder} is an adapter without its model. Merge it with peft's merge_and_unload, and "
            "give the folder of the result."
        )
    if whole:
        from linexport.sources.hugging_face.whole import load_whole

        return load_whole(folder, location)

    load = load_adapter if adapted else load_hugging_face
    return load(folder, location=location, **options)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError) as error:  # a name too long, a null byte
        raise UsageError(f"not a usable path: {error}. Check the spelling.") from error
