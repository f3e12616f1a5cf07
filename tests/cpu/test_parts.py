"""Parts of one product that a convolution and programs of the CPU library read where they lie.

The convolution multiplies its output by a factor of each token, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from linexport.plugins.ops.causal_conv import causal_conv
from linexport.plugins.ops.registry import attach_functions, register_schemas
from linexport.targets import cpu_fusion
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import with_programs
from linexport.targets.cpu_fusion.chains import with_chains
from linexport.targets.cpu_fusion.nodes import attributes
from linexport.targets.cpu_fusion.program import UnfitError
from tests.support.comparison import assert_close
from tests.support.native import check_in_place, session
from tests.support.runtimes import Arrays

BEFORE, CHANNELS, GATE = 5, 40, 24
"""Values of a token in front of the convolution's, the convolution's, and those of each half of the
gate behind them."""

WIDTH = BEFORE + CHANNELS + 2 * GATE

TEXT = """
    <ir_version: 10, opset_import: ["": 20, "linexport": 1]>
    mixer (float[B, T, 93] p, float[B, T, 1] mask, float[B, 40, 3] past_conv)
        => (float[B, T, 24] y, float[B, T, 5] s, float[B, 40, 3] present_conv)
        <float[B, T, 93] d, float[B, 40, T] xt, float[B, 40, T] ct, float[B, T, 40] c,
         float[B, T, 40] masked, float[B, T, 24] m>
    {
        d = Mul(p, scale)
        CUTS
        xt = Transpose<perm = [0, 2, 1]>(x)
        ct, present_conv = linexport.CausalConvWithState<activation = "silu">(xt, w, , past_conv)
        c = Transpose<perm = [0, 2, 1]>(ct)
        masked = Mul(mask, c)
        s = Softplus(a)
        m = MatMul(masked, matrix)
        z1, z2 = Split<axis = -1>(z, halves)
        g = Sigmoid(z1)
        h = Mul(g, z2)
        y = Mul(h, m)
    }
"""

CUTS = {
    "split": "a, x, z = Split<axis = -1>(SOURCE, sizes)",
    "slices": """a = Slice(SOURCE, zero, five, last)
        x = Slice(SOURCE, five, n45, last)
        z = Slice(SOURCE, n45, end, last)""",
    "split of a slice": """a = Slice(SOURCE, zero, five, last)
        rest = Slice(SOURCE, five, end, last)
        x, z = Split<axis = -1>(rest, rest_sizes)""",
}

CUTTING = {"Split", "Slice"}

SCALE = np.float32(np.linspace(0.5, 1.5, WIDTH))


def constants() -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "scale": SCALE,
        "w": np.float32(rng.normal(size=(CHANNELS, 1, 4)) / 2),
        "matrix": np.float32(rng.normal(size=(CHANNELS, GATE)) / 4),
        "sizes": np.array([BEFORE, CHANNELS, 2 * GATE]),
        "rest_sizes": np.array([CHANNELS, 2 * GATE]),
        "halves": np.array([GATE, GATE]),
        "zero": np.array([0]),
        "five": np.array([BEFORE]),
        "n45": np.array([BEFORE + CHANNELS]),
        "end": np.array([WIDTH]),
        "last": np.array([-1]),
    }


def mixer(cuts: str = "split", source: str = "p") -> onnx.ModelProto:
    """``source``: what is cut, the input or the program's product with the scale."""
    register_schemas()
    model = parser.parse_model(TEXT.replace("CUTS", CUTS[cuts]).replace("SOURCE", source))
    if source == "p":
        del model.graph.node[0]
    model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants().items())
    attach_functions(model)
    return model


def feeds(batch: int, length: int) -> Arrays:
    rng = np.random.default_rng(length)
    shapes = {"p": (batch, length, WIDTH), "past_conv": (batch, CHANNELS, 3)}
    shapes["mask"] = (batch, length, 1)
    return {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}


def reference(given: Arrays, source: str) -> list[np.ndarray]:
    own = {name: np.float64(value) for name, value in constants().items()}
    p = np.float64(given["p"]) * (own["scale"] if source == "d" else 1)
    a, x, z1, z2 = np.split(p, np.cumsum([BEFORE, CHANNELS, GATE]), axis=-1)
    c, present = causal_conv("silu", x.transpose(0, 2, 1), own["w"], None, given["past_conv"])
    gate = z2 / (1 + np.exp(-z1))
    masked = c.transpose(0, 2, 1) * given["mask"]
    return [gate * (masked @ own["matrix"]), np.log1p(np.exp(a)), present]


def scales(want: list[np.ndarray]) -> list[np.ndarray]:
    return [1 + np.abs(y) for y in want]


@pytest.mark.parametrize("source", ["p", "d"])
@pytest.mark.parametrize("cuts", CUTS)
def test_nothing_is_copied(cuts: str, source: str) -> None:
    made = with_programs(mixer(cuts, source))
    assert CUTTING.isdisjoint(node.op_type for node in made.graph.node)
    [convolution] = [node for node in made.graph.node if node.op_type == "CausalConvTokens"]
    assert attributes(convolution)["first_channel"] == BEFORE
    assert [*convolution.input] == [source, "w", "", "past_conv", "mask"]


@pytest.mark.parametrize("source", ["p", "d"])
@pytest.mark.parametrize("cuts", CUTS)
def test_equals_float64(cuts: str, source: str) -> None:
    model = with_chains(with_programs(mixer(cuts, source)))
    on_library, by_function = session(model, 2), OrtSession(model.SerializeToString(), 1)
    for batch, length in ((1, 1), (2, 1), (2, 3), (1, 40), (2, 40), (2, 0)):
        x = feeds(batch, length)
        want = reference(x, source)
        assert_close(on_library.run(None, x), want, scales(want), 3e-6)
        if length:  # Conv takes no empty one
            assert_close([*by_function.run(x).values()], want, scales(want), 3e-6)


def test_states_in_place() -> None:
    check_in_place(with_chains(with_programs(mixer())), feeds(2, 1))


@pytest.mark.parametrize("name", ["a", "x", "z"])
def test_what_others_read_is_copied_alone(name: str) -> None:
    """Of the parts, one program copies that which a node without program reads."""
    model = mixer()
    sizes = {"a": BEFORE, "x": CHANNELS, "z": 2 * GATE}
    model.graph.node.append(helper.make_node("Elu", [name], ["e"]))
    shape = ["B", "T", sizes[name]]
    model.graph.output.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, shape))
    made = with_programs(model)
    made_by = {n: node for node in made.graph.node for n in node.output}
    assert {"a", "x", "z"} & made_by.keys() <= {name, *made_by[name].output}
    assert CUTTING.isdisjoint({node.op_type for node in made.graph.node} - {made_by[name].op_type})
    x = feeds(2, 9)
    part = np.split(x["p"], np.cumsum([BEFORE, CHANNELS]), axis=-1)["axz".index(name)]
    want = [*reference(x, "p"), np.where(part > 0, part, np.expm1(np.float64(part)))]
    for opened in (session(made, 1), session(with_chains(made), 2)):
        assert_close(opened.run(None, x), want, scales(want), 3e-6)


@pytest.mark.parametrize("unfit", ["Softplus", "Sigmoid", "Mul"])
def test_a_group_without_program_gets_its_part(unfit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others read theirs in place all the same."""
    fused = cpu_fusion._fused

    def refused(model: onnx.ModelProto, group: list[int], *more: Any) -> Any:
        if unfit in {model.graph.node[index].op_type for index in group}:
            raise UnfitError(unfit)
        return fused(model, group, *more)

    monkeypatch.setattr(cpu_fusion, "_fused", refused)
    x = feeds(2, 9)
    for cuts in CUTS:
        made, want = with_programs(mixer(cuts, "d")), reference(x, "d")
        assert unfit in {node.op_type for node in made.graph.node}
        assert_close(session(made).run(None, x), want, scales(want), 3e-6)


def test_a_product_of_channels_or_with_others_is_a_program() -> None:
    """A factor that is no number a token, and a product whose program has another node."""
    channels, more = mixer(), mixer()
    channels.graph.input[1].type.tensor_type.shape.dim[2].dim_value = CHANNELS
    [product] = [node for node in more.graph.node if node.output[0] == "masked"]
    more.graph.node.insert(
        [*more.graph.node].index(product) + 1, helper.make_node("Neg", ["masked"], ["n"])
    )
    [matrix] = [node for node in more.graph.node if node.op_type == "MatMul"]
    matrix.input[0] = "n"
    for model, sign, width in ((channels, 1, CHANNELS), (more, -1, 1)):
        made, x = with_programs(model), feeds(2, 9)
        [convolution] = [node for node in made.graph.node if node.op_type == "CausalConvTokens"]
        assert len(convolution.input) == 4
        x["mask"] = np.repeat(x["mask"], width, axis=-1)
        y, *others = reference(x, "p")
        want = [sign * y, *others]
        assert_close(session(made).run(None, x), want, scales(want), 3e-6)


def test_channels_that_the_input_lacks_are_refused() -> None:
    made = with_programs(mixer())
    [convolution] = [node for node in made.graph.node if node.op_type == "CausalConvTokens"]
    [first] = [a for a in convolution.attribute if a.name == "first_channel"]
    first.i = WIDTH - CHANNELS + 1
    with pytest.raises(Exception, match="weight has other channels than the input"):
        session(made).run(None, feeds(1, 2))
