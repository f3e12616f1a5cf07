"""Files next to the model that build its engine on the machine of the GPU.

engine.onnx              of a language model: the graph of its engine, see ``engine_form``
linexport_tensorrt.cpp   the plugin library's source, one file
build.sh                 compiles it and calls trtexec, without Python: sh build.sh 87
run.cpp, run.py          run an engine: a dozen lines to copy from; of a language model whose
                         tokenizer is described, run.cpp writes texts
linexport_text.h, .bin   its tokenizer and the choice of tokens
linexport_engine.h, .py  what these call: opens it, and carries the states on the GPU
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources

import numpy as np
import onnx

from linexport.graph.dims import DimRange, sequence
from linexport.manifest import MODEL
from linexport.manifest.prepared import PreparedGpuRecord, PreparedRecord
from linexport.manifest.records import InputRecord
from linexport.plugins.kernels import contract
from linexport.plugins.kernels.architectures import toolchain
from linexport.plugins.ops.registry import dim_of
from linexport.plugins.tensorrt import library, quick
from linexport.plugins.tensorrt.flavour import Flavour
from linexport.system import escape
from linexport.system.terminal import printable
from linexport.targets.base import Converted, Options
from linexport.targets.runtime.options import LOGITS_AT
from linexport.targets.trt import parser_form
from linexport.targets.trt.engine_form import EngineForm, engine_form

GRAPH = "engine.onnx"
SOURCE, SCRIPT, CPP, PYTHON = "linexport_tensorrt.cpp", "build.sh", "run.cpp", "run.py"
HEADER, MODULE = "linexport_engine.h", "linexport_engine.py"
TEXT_HEADER, TEXT = "linexport_text.h", "linexport_text.bin"
TEXT_CPP = "text.cpp"
"""The template of ``run.cpp`` where there is a tokenizer."""

PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
"""Names that trtexec takes: ':', ',' and 'x' have a meaning in its list of names and shapes."""

INTEGERS = ("int32", "int64")
"""Types of tokens."""

NEXT_CALLS = 3
"""Calls of one token that the programs make after the first."""

BUILD = """\
#!/bin/sh
# Builds the engine of this folder on the machine of its GPU, without Python: sh build.sh {first}
# TENSORRT_INCLUDE: folder of NvInfer.h. CUDA_HOME: of the CUDA toolkit. Not run on a GPU yet.
set -e
cd "$(dirname "$0")"
case "$1" in {sms}) ;; *) echo "usage: sh build.sh {sms}" >&2; exit 2 ;; esac
{library}trtexec --saveEngine="model.sm$1.engine" --timingCacheFile="timing.sm$1.cache" \\
    {arguments}
"""

COMPILE = """\
c++ -std=c++17 -O2 -fPIC -shared -fvisibility=hidden \\
    -isystem "${{TENSORRT_INCLUDE:-/usr/include/$(uname -m)-linux-gnu}}" \\
    -isystem "${{CUDA_HOME:-/usr/local/cuda}}/include" {source} -o {library} -ldl
"""

LOAD = """\
        void* plugins = runtime->getPluginRegistry().loadLibrary("./{library}");
        need(plugins, "build {library} first: sh build.sh");
"""

LAST = """\
        if "{at}" not in values:  # logits of the last token of each row
            rows, tokens = np.shape(values[{tokens}])
            values = {{**values, "{at}": np.full((rows, 1), tokens - 1)}}
"""


def engine_name(sm: int) -> str:
    """Return the file of the engine for a compute capability."""
    return f"model.sm{sm}.engine"


def cache_name(sm: int) -> str:
    """Return the file of kernels' times that engines of a compute capability are built with."""
    return f"timing.sm{sm}.cache"


def assemble(flavour: Flavour, options: Options, converted: Converted) -> PreparedRecord:
    """Write the files next to the model; returns the record of them."""
    folder = converted.model.parent
    model = onnx.load_model(str(converted.model), load_external_data=False)
    spaces = parser_form.namespaces(model)
    own, alone = contract.NAMESPACE in spaces, quick.NAMESPACE not in spaces
    if own:
        (folder / SOURCE).write_text(library.single_source(), encoding="utf-8")
    alone = alone and all(PLAIN.fullmatch(i.name) for i in model.graph.input)
    form = engine_form(model, converted)
    arguments = _arguments(form, own) if alone else None
    if arguments is not None:
        (folder / SCRIPT).write_text(_script(arguments, options.sms, own), encoding="utf-8")
    graph = GRAPH if form.logits is not None and arguments is not None else None
    if graph is not None:
        onnx.save_model(form.model, folder / graph)
    keeps = form.logits is not None
    programs = _cpp(converted, own, keeps) | _text_programs(converted) | _python(converted, keeps)
    for name, text in programs.items():
        (folder / name).write_text(text, encoding="utf-8")
    others = [TEXT] if TEXT_HEADER in programs else []
    for name in others:
        (folder / name).write_bytes(converted.text or b"")
    return PreparedRecord(
        runtime=flavour.name,
        gpus=tuple(_gpu(sm, bool(spaces), arguments) for sm in options.sms),
        plugin_source=SOURCE if own else None,
        script=SCRIPT if arguments is not None else None,
        loaders=(*programs, *others),
        graph=graph,
    )


def _gpu(sm: int, kernels: bool, arguments: Sequence[str] | None) -> PreparedGpuRecord:
    engine, cache, made = engine_name(sm), cache_name(sm), toolchain(sm) if kernels else None
    return PreparedGpuRecord(
        sm=sm,
        engine=engine,
        timing_cache=cache,
        cuda=made.cuda if made else None,
        driver=made.driver if made else None,
        trtexec=None
        if arguments is None
        else (f"--saveEngine={engine}", f"--timingCacheFile={cache}", *arguments),
    )


def _arguments(form: EngineForm, own: bool) -> tuple[str, ...]:
    """Arguments of trtexec, but for the names of files it writes."""
    model, file = form.model, MODEL if form.logits is None else GRAPH
    found = [f"--onnx={file}", "--stronglyTyped", "--skipInference"]
    if own:
        found.append(f"--dynamicPlugins=./{library.NAME}")
    shapes = {i.name: [dim_of(d) for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    dynamic = {
        n: [d for d in s if d is not None]
        for n, s in shapes.items()
        if any(isinstance(d, str) for d in s)
    }
    for place, profile in enumerate(form.profiles if dynamic else ()):
        found += [f"--profile={place}"] if len(form.profiles) > 1 else []
        sides = {n: profile.shapes(shape) for n, shape in dynamic.items()}
        for side, name in enumerate(("min", "opt", "max")):
            listed = (f"{n}:{'x'.join(map(str, s[side]))}" for n, s in sides.items())
            found.append(f"--{name}Shapes={','.join(listed)}")
    return tuple(found)


def _script(arguments: Iterable[str], sms: Sequence[int], own: bool) -> str:
    made = COMPILE.format(source=SOURCE, library=library.NAME) if own else ""
    return BUILD.format(
        first=sms[0],
        sms="|".join(map(str, sms)),
        library=made,
        arguments=" \\\n    ".join(map(escape.shell_word, arguments)),
    )


def _template(name: str, **values: str) -> str:
    text = resources.files("linexport.targets.trt").joinpath(f"templates/{name}.txt").read_text()
    # In one pass: a value may look like the place of another one.
    return re.sub(r"@([A-Z]+)@", lambda place: values[place[1].lower()], text)


def _calls(converted: Converted) -> list[int]:
    """Tokens of the calls that the programs make: the usual number, then one by one."""
    length = sequence(converted.dims)
    if length is None:
        return [1]
    limits = converted.dims[length]
    follow = [1] * NEXT_CALLS if converted.states and limits.allows(1) else []
    return [limits.nearest(limits.opt or limits.min), *follow]


def _sizes(one: InputRecord, dims: Mapping[str, DimRange], grows: int | None) -> list[str]:
    """Sizes of an input as text of a program: numbers, and ``tokens``."""
    found, length = [], sequence(dims)
    for axis, size in enumerate(one.shape):
        if isinstance(size, int):
            found.append(str(size))
        elif size is None or axis == grows or size not in dims:
            found.append("0")
        elif size == length:
            found.append("tokens")
        else:
            limits = dims[size]
            usual = 1 if limits.batch else limits.opt or limits.min
            found.append(str(limits.nearest(usual)))
    return found


def _tokens(converted: Converted) -> InputRecord:
    """Return the first input that is not a state."""
    states = {s.past for s in converted.states}
    return next(i for i in converted.inputs if i.name not in states)


def _cpp(converted: Converted, own: bool, keeps: bool) -> dict[str, str]:
    """Return the files in C++; ``keeps``: the engine gives logits of the tokens it is asked for."""
    states, rows = {s.past: s for s in converted.states}, []
    for one in converted.inputs:
        state, element = states.get(one.name), np.dtype(one.dtype)
        sizes = _sizes(one, converted.dims, state.grows if state else None)
        shape = f"{{{len(sizes)}, {{{', '.join(sizes)}}}}}"
        present = escape.cpp_string(state.present if state else "")
        start = _start(state.initial if state else one.default or 0, element)
        name = escape.cpp_string(one.name)
        rows.append(f"        {{{name}, {element.itemsize}, {shape}, {present}, {start}}},")
    if keeps:
        rows_of_batch = _sizes(_tokens(converted), converted.dims, None)[0]
        rows.append(f'        {{LOGITS_AT, 8, {{2, {{{rows_of_batch}, 1}}}}, "", {{}}}},')
    plugins = LOAD.format(library=library.NAME) if own else ""
    return {
        CPP: _template(
            CPP,
            calls=", ".join(map(str, _calls(converted))),
            input=escape.cpp_string(_tokens(converted).name),
            output=escape.cpp_string(_output(converted)),
            shown=escape.cpp_string(printable(_output(converted))),
        ),
        HEADER: _template(HEADER, inputs="\n".join(rows), plugins=plugins),
    }


def _text_programs(converted: Converted) -> dict[str, str]:
    """Return the program that writes texts, where an engine needs nothing but tokens."""
    states, length = {s.past for s in converted.states}, sequence(converted.dims)
    tokens, *others = (one for one in converted.inputs if one.name not in states)
    defaults = all(one.default is not None for one in others)
    logits = next((o for o in converted.outputs if o.name == converted.logits), None)
    usable = defaults and tokens.dtype in INTEGERS and converted.states and length is not None
    if converted.text is None or logits is None or logits.dtype != "float32" or not usable:
        return {}
    limits = converted.dims[length or ""]
    if not limits.allows(1) or limits.max is None:
        return {}
    return {
        CPP: _template(
            TEXT_CPP,
            most=str(limits.max),
            token=f"{tokens.dtype}_t",
            input=escape.cpp_string(tokens.name),
            output=escape.cpp_string(logits.name),
            vocabulary=str(logits.shape[-1]),
        ),
        TEXT_HEADER: _template(TEXT_HEADER),
    }


def _start(value: float, element: np.dtype[np.generic]) -> str:
    """Bytes of an element as C++ lists them; none where they are zeros."""
    found = np.array(value, element).tobytes()
    return f"{{{', '.join(map(str, found)) if any(found) else ''}}}"


def _output(converted: Converted) -> str:
    carried = {s.present for s in converted.states}
    return next(o.name for o in converted.outputs if o.name not in carried)


def _python(converted: Converted, keeps: bool) -> dict[str, str]:
    states, calls = {s.past for s in converted.states}, _calls(converted)
    rows = []
    for one in converted.inputs:
        if one.name not in states:
            shape = f"({', '.join(_sizes(one, converted.dims, None))},)"
            dtype = escape.python_string(one.dtype)
            value = f"np.full({shape}, {one.default or 0}, {dtype})"
            rows.append(f"{escape.python_string(one.name)}: {value}")
    listed = "".join(f"{n}, " for n in calls).strip()
    tokens = escape.python_string(_tokens(converted).name)
    last = LAST.format(at=LOGITS_AT, tokens=tokens) if keeps else ""
    return {
        PYTHON: _template(PYTHON, calls=listed, zeros=", ".join(rows)),
        MODULE: _template(MODULE, last=last),
    }
