"""What the TensorRT tests share: nodes as models, engines built of them once.

Engines are really built, by TensorRT-RTX, which needs no GPU for it. None is run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from linexport.graph.dims import DimRange
from linexport.plugins.tensorrt.flavour import RTX
from linexport.targets import Options
from linexport.targets.lowering.choice import lower
from tests.support import tensorrt_models

DIMS = {"batch": DimRange(1, 1, 1, batch=True), "seq": DimRange(1, 512, 1024)}


@pytest.fixture(scope="session")
def rtx() -> Any:
    """TensorRT-RTX's Python module."""
    if not RTX.installed:
        pytest.skip(f"TensorRT-RTX is not installed here: {RTX.install}")
    return RTX.load()


@pytest.fixture(scope="session")
def engines(rtx: Any) -> SimpleNamespace:
    """``engine(model, sm, **options)`` builds once; ``lowered`` gives the model and choices."""
    from linexport import passes, targets
    from linexport.graph import states
    from linexport.targets.trt import parser_form
    from linexport.targets.trt.build import build_engine
    from linexport.targets.trt.profiles import profiles

    target = targets.find_target("tensorrt-rtx")
    made: dict[Any, Any] = {}

    def lowered(model: onnx.ModelProto, **options: Any) -> tuple[onnx.ModelProto, list[Any]]:
        chosen = target.configure(target, Options(**{"sms": (89, 120), **options}))
        return lower(chosen.prepare(passes.run(model, ("absorb",))), chosen.candidates)

    def engine(
        model: onnx.ModelProto,
        sm: int = 89,
        again: bool = False,
        decode: bool = False,
        **options: Any,
    ) -> Any:
        key = (model.SerializeToString(deterministic=True), sm, again, decode, str(options))
        if key not in made:
            low, _ = lowered(model, **options)
            chosen = profiles(DIMS, decode and bool(states.find_states(low)))
            made[key] = build_engine(
                RTX, parser_form.only(parser_form.parsable(low), sm), Path("model.onnx"), chosen, sm
            )
        return made[key]

    return SimpleNamespace(engine=engine, lowered=lowered)


@pytest.fixture
def made(rtx: Any, converted: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact with one engine."""
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:16:200",)}
    place = tmp_path / "made"
    shutil.copytree(converted("small", **options), place)
    return place


@pytest.fixture(scope="session")
def description(engines: SimpleNamespace) -> Callable[..., Any]:
    """``description(...)``: that of the attention node of ``models.node(...)``."""
    from linexport.plugins.kernels.description import Description

    def describe(**arguments: Any) -> Description:
        low, _ = engines.lowered(tensorrt_models.node(**arguments))
        node = next(n for n in low.graph.node if n.op_type == "LinearAttention")
        texts = {a.name: a.s.decode() for a in node.attribute if a.name in ("launch", "binaries")}
        return Description.from_attributes(texts)

    return describe
