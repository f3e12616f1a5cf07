"""ONNX files: what is read of them, and every way in which one can be no model to convert."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from google.protobuf.message import DecodeError
from onnx import TensorProto, external_data_helper, helper, numpy_helper, parser

from linexport.errors import LinexportError, UnsupportedModelError
from linexport.graph.dims import DimRange
from linexport.sources import load_model
from linexport.sources.onnx_file import document
from linexport.sources.onnx_file.skeleton import skeleton
from linexport.sources.onnx_file.structure import check_structure
from tests.support.damage import damaged

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
RELU = "g (float[batch, seq, 4] x) => (float[batch, seq, 4] y) { y = Relu(x) }"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """``written(text or model)``: a file of it."""

    def write(source: str | bytes | onnx.ModelProto, name: str = "m.onnx") -> Path:
        model = parser.parse_model(source) if isinstance(source, str) else source
        content = model if isinstance(model, bytes) else model.SerializeToString()
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def not_utf8(model: onnx.ModelProto, text: bytes) -> bytes:
    """Bytes of the model with a text in it made one that is none."""
    return model.SerializeToString().replace(text, b"\xff" + text[1:])


def linear(location: str | None = None, dims: tuple[int, int] = (4, 4)) -> onnx.ModelProto:
    """y = x w; the weight inside, or said to be at ``location``."""
    model = parser.parse_model(
        f"{HEAD} g (float[n, 4] x) => (float[n, m] y) {{ y = MatMul(x, w) }}"
    )
    weight = numpy_helper.from_array(np.ones(dims, np.float32), "w")
    if location is not None:
        size = 4 * dims[0] * dims[1]
        external_data_helper.set_external_data(weight, location, 0, size)
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
    model.graph.initializer.append(weight)
    return model


def axes_of_type(data_type: int) -> onnx.ModelProto:
    """y = Unsqueeze(x, axes), the axes a constant of this data type."""
    model = parser.parse_model(
        f"{HEAD} g (float[n] x) => (float[m, n] y) "
        "{ axes = Constant <value = int64[1] {0}> () y = Unsqueeze (x, axes) }"
    )
    stored = TensorProto(dims=[1], data_type=data_type, raw_data=bytes(8))
    model.graph.node[0].attribute[0].t.CopyFrom(stored)
    return model


# What is read


def test_names_sizes_and_source_of_a_file(written: Callable[..., Path]) -> None:
    path = written(f"{HEAD} {RELU}")
    loaded = load_model(path)
    assert loaded.source.kind == "onnx" and loaded.source.location == str(path)
    assert loaded.source.description == "ONNX graph, 1 nodes, 0 parameters"
    assert loaded.source.sha256 and len(loaded.source.sha256) == 64
    assert loaded.graph is not None
    assert loaded.graph.dims == {"batch": DimRange(batch=True), "seq": DimRange()}
    assert loaded.graph.shapes == [("batch", "seq", 4)]
    assert loaded.graph.sizes == {"batch": 2, "seq": 100}
    x = torch.randn(3, 7, 4)
    assert torch.equal(loaded.module(x)[0], x.relu())


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(512, {"batch": 2, "seq": 64}), (4, {"batch": 1, "seq": 1})],
)
def test_examples_of_many_values_are_tried_at_smaller_sizes(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, most: int, sizes: dict[str, int]
) -> None:
    monkeypatch.setattr("linexport.sources.onnx_file.dynamic_shapes.MOST_CHOSEN", most)
    loaded = load_model(written(f"{HEAD} {RELU}"))
    assert loaded.graph is not None and loaded.graph.sizes == sizes


def test_inputs_of_too_many_values_are_refused_before_they_are_drawn(
    written: Callable[..., Path],
) -> None:
    text = f"{HEAD} g (float[65536, 65536] x) => (float[65536, 65536] y) {{ y = Relu(x) }}"
    with pytest.raises(UnsupportedModelError, match=r"4,294,967,296 values .* are drawn"):
        load_model(written(text))


def test_examples_are_drawn_in_blocks_as_they_are_at_once(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(f"{HEAD} {RELU}")
    at_once = load_model(path).args[0]
    monkeypatch.setattr("linexport.sources.onnx_file.dynamic_shapes.BLOCK", 7)
    assert torch.equal(load_model(path).args[0], at_once)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ("float[N, T, 4]", {"N": True, "T": False}),
        ("float[T, batch_size, 4]", {"T": False, "batch_size": True}),
        ("float[, , 4]", {"batch": True, "seq": False}),
        ("float[2, 3, height, width]", {"height": False, "width": False}),
        ("float[3, 5]", {}),
    ],
)
def test_dimensions_keep_the_names_of_the_file(
    written: Callable[..., Path], shape: str, names: dict[str, bool]
) -> None:
    shape = shape.replace("[, , ", "[a, b, ")
    model = parser.parse_model(f"{HEAD} g ({shape} x) => (float y) {{ y = Relu(x) }}")
    for dim in model.graph.input[0].type.tensor_type.shape.dim:
        if dim.dim_param in ("a", "b"):
            dim.Clear()
    graph = load_model(written(model)).graph
    assert graph is not None
    assert {name: limits.batch for name, limits in graph.dims.items()} == names


def test_a_size_of_minus_one_is_dynamic(written: Callable[..., Path]) -> None:
    model = parser.parse_model(f"{HEAD} {RELU}")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    graph = load_model(written(model)).graph
    assert graph is not None and set(graph.dims) == {"batch", "seq"}


def test_integers_index_the_table_they_are_looked_up_in(written: Callable[..., Path]) -> None:
    text = f"""{HEAD} g (int32[N, T] ids, int64[N, T] mask) => (float[N, T, 3] y) {{
        table = Constant <value = float[2] {{0, 0}}> ()
        wide = Cast <to = 7> (ids)
        rows = Gather(weight, wide)
        m = Cast <to = 1> (mask)
        axis = Constant <value = int64[1] {{2}}> ()
        column = Unsqueeze(m, axis)
        y = Mul(rows, column)
    }}"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((11, 3), np.float32), "weight"))
    loaded = load_model(written(model))
    assert loaded.integer_ranges == {0: (0, 11), 1: (0, 2)}
    assert loaded.args[0].dtype == torch.int32


def test_weights_among_the_inputs_are_weights(written: Callable[..., Path]) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4]))
    model.ir_version = 3
    loaded = load_model(written(model))
    assert len(loaded.args) == 1 and loaded.warnings == ()


def test_an_input_with_a_default_value_becomes_a_constant_that_a_warning_names(
    written: Callable[..., Path],
) -> None:
    model = linear()
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 4]))
    loaded = load_model(written(model))
    assert len(loaded.args) == 1
    [warning] = loaded.warnings
    assert "become constants of that value: w." in warning


def test_weights_beside_the_file_belong_to_it(written: Callable[..., Path], tmp_path: Path) -> None:
    path = written(linear("w.data"))
    (tmp_path / "w.data").write_bytes(np.full(16, 2, np.float32).tobytes())
    loaded = load_model(path)
    assert loaded.module(torch.ones(1, 4))[0].tolist() == [[8.0] * 4]
    (tmp_path / "w.data").write_bytes(np.full(16, 3, np.float32).tobytes())
    assert load_model(path).source.sha256 != loaded.source.sha256


def test_nodes_out_of_order_are_sorted(written: Callable[..., Path]) -> None:
    path = written(f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Relu(a)  a = Neg(x) }}")
    assert [n.op_type for n in document.read(path).graph.node] == ["Neg", "Relu"]
    assert load_model(path).module(torch.tensor([-2.0]))[0].item() == 2


def test_a_graph_computes_in_its_own_dtypes(written: Callable[..., Path]) -> None:
    module = load_model(written(f"{HEAD} {RELU}")).module
    with pytest.raises(UnsupportedModelError, match="dtypes"):
        module.to(torch.float16)


def test_an_empty_dimension_is_a_size_like_another(written: Callable[..., Path]) -> None:
    loaded = load_model(written(f"{HEAD} g (float[n, 0] x) => (float[n, 0] y) {{ y = Relu(x) }}"))
    assert loaded.args[0].shape == (100, 0)


def test_the_first_sizes_that_run_are_taken(written: Callable[..., Path]) -> None:
    text = f"""{HEAD} g (float[n] x) => (float[r, 8] y) {{
        shape = Constant <value = int64[2] {{-1, 8}}> ()
        y = Reshape(x, shape)
    }}"""
    graph = load_model(written(text)).graph
    assert graph is not None and graph.sizes == {"n": 64}


def test_functions_that_call_each_other_are_read_while_they_are_few(
    written: Callable[..., Path],
) -> None:
    loaded = load_model(written(doubling(5)))
    assert torch.equal(loaded.module(torch.tensor([-1.0, 2.0]))[0], torch.tensor([0.0, 2.0]))


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_skeleton_is_the_file_without_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    """Where the graph is in two fields of the file, as large artifacts have it, both are read."""
    monkeypatch.setattr("linexport.sources.onnx_file.skeleton.KEPT", 0)
    whole, path = linear(), tmp_path / "m.onnx"
    late = onnx.ModelProto(graph=onnx.GraphProto(initializer=[linear("../w").graph.initializer[0]]))
    late.graph.node.append(helper.make_node("Relu", ["y"], ["z"]))
    path.write_bytes(whole.SerializeToString() + late.SerializeToString() * (pieces - 1))
    expected = onnx.load(path, load_external_data=False)
    for tensor in expected.graph.initializer:
        tensor.ClearField("raw_data")
    assert skeleton(path) == expected
    assert len(expected.graph.initializer) == pieces


def test_a_damaged_file_has_no_skeleton(tmp_path: Path) -> None:
    path, content = tmp_path / "m.onnx", linear().SerializeToString()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        with contextlib.suppress(DecodeError):
            skeleton(path)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(DecodeError):
        skeleton(path)


# What is refused


def cyclic() -> str:
    return f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Add(x, a)  a = Relu(b)  b = Neg(y) }}"


def recursive() -> str:
    imports = 'opset_import: ["" : 17, "local" : 1]'
    functions = "".join(
        f'<domain: "local", {imports}> {name} (a) => (b) {{ b = local.{other}(a) }}\n'
        for name, other in (("F", "G"), ("G", "F"))
    )
    graph = "g (float[n] x) => (float[n] y) { y = local.F(x) }"
    return f"<ir_version: 8, {imports}> {graph}\n{functions}"


def functions(calls: dict[str, str], first: str) -> str:
    imports = 'opset_import: ["" : 17, "local" : 1]'
    bodies = "".join(
        f'<domain: "local", {imports}> {name} (a) => (b) {{ {body} }}\n'
        for name, body in calls.items()
    )
    graph = f"g (float[n] x) => (float[n] y) {{ y = local.{first}(x) }}"
    return f"<ir_version: 8, {imports}> {graph}\n{bodies}"


def doubling(times: int) -> str:
    """Functions that each call the next one twice."""
    calls = {f"F{i}": f"c = local.F{i + 1}(a) b = local.F{i + 1}(c)" for i in range(times)}
    return functions({**calls, f"F{times}": "b = Relu(a)"}, "F0")


def chain(times: int) -> str:
    calls = {f"F{i}": f"b = local.F{i + 1}(a)" for i in range(times)}
    return functions({**calls, f"F{times}": "b = Relu(a)"}, "F0")


def overloaded() -> onnx.ModelProto:
    """A function that calls itself, hidden by one of another overload."""
    model = parser.parse_model(functions({"F": "b = local.F(a)", "G": "b = Relu(a)"}, "F"))
    model.functions[1].name, model.functions[1].overload = "F", "other"
    return model


def twice_defined() -> onnx.ModelProto:
    model = parser.parse_model(functions({"F": "b = Relu(a)", "G": "b = local.F(a)"}, "F"))
    model.functions[1].name = "F"
    return model


BAD = [
    (lambda: doubling(40), r"its functions expand to \d{13} nodes; at most 65536 are read"),
    (lambda: chain(101), "its functions call each other 102 deep; at most 100 are read"),
    (overloaded, "its functions call each other in a circle: F -> F"),
    (twice_defined, "two functions of the same domain and name"),
    (lambda: linear("a\0b"), "inside the model's folder"),
    (lambda: linear("n" * 300), "inside the model's folder"),
    (lambda: linear("circle.data"), "inside the model's folder"),
    (cyclic, "its nodes form a cycle: .*Relu"),
    (recursive, "its functions call each other in a circle: F -> G -> F"),
    (
        lambda: f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Relu(x)  y = Neg(x) }}",
        "1 values have a name that is defined twice: y",
    ),
    (lambda: f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Frobnicate(x) }}", "Frobnicate"),
    (
        lambda: (
            '<ir_version: 8, opset_import: ["" : 17, "acme" : 1]> '
            "g (float[n] x) => (float[n] y) { y = acme.Twice(x) }"
        ),
        "ONNX Runtime cannot open it.*Twice",
    ),
    (lambda: f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Relu(z) }}", "z"),
    (lambda: f"{HEAD} g (float[n] x) => (float[n] y) {{ a = Relu(x) }}", "y"),
    (lambda: f"{HEAD} g (float[n, 3] x) => (float y) {{ y = MatMul(x, x) }}", "MatMul|none of"),
    (
        lambda: (
            f"{HEAD} g (seq(float[n]) x) => (float y) {{ y = ConcatFromSequence <axis = 0> (x) }}"
        ),
        "x is a seq|no tensor",
    ),
    (lambda: f"{HEAD} g (string[n] x) => (string[n] y) {{ y = Identity(x) }}", "string"),
    (lambda: '<ir_version: 8, opset_import: ["" : 99]> ' + RELU, "opset|99"),
    (lambda: onnx.ModelProto(ir_version=8), "without a graph"),
    (lambda: linear("../w.data"), r"refers to '\.\./w\.data'.*inside the model's folder"),
    (lambda: linear("/etc/hostname"), "inside the model's folder"),
    (lambda: linear("a/../../w.data"), "inside the model's folder"),
    (lambda: linear("link.data"), "inside the model's folder"),
    (lambda: linear("."), "inside the model's folder"),
    (lambda: linear(""), "inside the model's folder"),
    (lambda: linear("gone.data"), "kept in gone.data, which is missing"),
    (lambda: linear("short.data"), "needs 64 bytes; short.data has 10"),
    (lambda: not_utf8(linear("w.data"), b"w.data"), "not UTF-8"),
    # ONNX Runtime ends the process where such a graph runs.
    (
        lambda: (
            HEAD
            + """ g (float[n] x) => (float[m, n] y) {
            y = Einsum <equation = "ij,jk->ik"> (x, x)
        }"""
        ),
        "contradict each other.*Rank of input 0",
    ),
    (
        lambda: (
            HEAD
            + """ g (float[n, k] x, int64[r] shape) => (float[m, n] y) <float[a, b] z> {
            z = Reshape(x, shape)
            y = Einsum <equation = "ij,jk->ik"> (z, z)
        }"""
        ),
        "Einsum reads 'z', whose number of dimensions is known only when the graph runs",
    ),
    (
        lambda: (
            HEAD
            + """ g (float[n, k] x, int64[4000000000] shape) => (float[m, n] y) {
            z = Reshape(x, shape)
            y = Einsum <equation = "ij,jk->ik"> (z, z)
        }"""
        ),
        "Einsum reads 'z', whose number of dimensions is known only when the graph runs",
    ),
    (lambda: axes_of_type(2**31 - 1), "invalid ONNX model: .*data type 2147483647"),
    (
        lambda: (
            HEAD
            + """ g (float[n, k] x) => (float[n, k] y) {
            y = Einsum <equation = "ij,jk->ik"> (x, "")
        }"""
        ),
        "Einsum '' lacks one of its inputs: 'x', ''",
    ),
]


EINSUMS = {
    "of a computed shape": """ g (float[n, k] x) => (float[a, b] y) {
        s = Shape(x)
        t = Concat <axis = 0> (s)
        z = Reshape(x, t)
        y = Einsum <equation = "ij,kj->ik"> (x, z)
    }""",
    "reshaped": """ g (float[2, 3] x) => (float[a, b] y) <int64[2] s = {3, 2}> {
        z = Reshape(x, s)
        y = Einsum <equation = "ij,jk->ik"> (x, z)
    }""",
    "in a branch": """ g (float[2, 3] x) => (float[a, b] y) <bool c = {1}> {
        y = If (c) <
            then_branch = t () => (float[a, b] u) {
                w = Relu(x)
                u = Einsum <equation = "ij,kj->ik"> (w, x)
            },
            else_branch = e () => (float[a, b] v) { v = Identity(x) }
        >
    }""",
    "of any rank": """ g (float[2, 3] x) => (float[a] y) {
        y = Einsum <equation = "...j->..."> (x)
    }""",
}


@pytest.mark.parametrize("name", EINSUMS)
def test_an_einsum_whose_ranks_follow_from_the_graph_is_read(
    written: Callable[..., Path], name: str
) -> None:
    found = load_model(written(HEAD + EINSUMS[name]))
    assert found.module(*found.args)[0].shape[0] == 2


@pytest.mark.parametrize("links", [1, 2])
def test_shapes_beside_the_file_tell_ranks(tmp_path: Path, links: int) -> None:
    """Also where their file has another hard link, which onnx's own reader refuses."""
    model = parser.parse_model(HEAD + EINSUMS["reshaped"])
    shape = numpy_helper.to_array(model.graph.initializer[0])
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(shape, "s"))
    external = {"save_as_external_data": True, "location": "all.data", "size_threshold": 0}
    onnx.save_model(model, str(tmp_path / "m.onnx"), **external)
    if links == 2:
        (tmp_path / "again.data").hardlink_to(tmp_path / "all.data")
    check_structure(tmp_path / "m.onnx", onnx.load(tmp_path / "m.onnx", load_external_data=False))


@pytest.mark.parametrize(("model", "match"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_files_are_refused_with_the_reason(
    written: Callable[..., Path], tmp_path: Path, model: Callable[[], object], match: str
) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}.outside"
    outside.write_bytes(bytes(64))
    (tmp_path / "link.data").symlink_to(outside)
    (tmp_path / "circle.data").symlink_to(tmp_path / "circle.data")
    (tmp_path / "short.data").write_bytes(bytes(10))
    path = written(model())
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        load_model(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_weight_inside_a_branch_is_checked_too(
    written: Callable[..., Path], tmp_path: Path
) -> None:
    weight = linear("../secret").graph.initializer[0]
    inner = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["inner"])],
        "then",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, [4, 4])],
        [weight],
    )
    model = parser.parse_model(f"{HEAD} g (bool c) => (float[4, 4] y) {{ y = Identity(c) }}")
    del model.graph.node[:]
    model.graph.node.append(
        helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    )
    with pytest.raises(UnsupportedModelError, match="secret"):
        load_model(written(model))


def test_a_file_beyond_a_protobuf_is_refused_before_it_is_read(
    written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(linear())
    monkeypatch.setattr(document, "LARGEST", 50)
    with pytest.raises(UnsupportedModelError, match=r"in one piece.*save_as_external_data"):
        load_model(path)


@pytest.mark.parametrize("whole", [lambda: linear(), lambda: parser.parse_model(f"{HEAD} {RELU}")])
def test_damaged_files_never_escape_as_other_errors(
    tmp_path: Path, whole: Callable[[], onnx.ModelProto]
) -> None:
    content = whole().SerializeToString()
    path, refused = tmp_path / "m.onnx", 0
    for data in damaged(content, trials=150, seed=3, every=20):
        path.write_bytes(data)
        try:
            load_model(path)
        except LinexportError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


def test_unknown_domains_that_have_a_body_are_kept_and_inlined(
    written: Callable[..., Path],
) -> None:
    from linexport.trace import trace

    text = """<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[n] x) => (float[n] y) { y = acme.Twice(x) }
        <domain: "acme", opset_import: ["" : 17]>
        Twice (a) => (b) { b = Add(a, a) }"""
    loaded = load_model(written(text))
    assert loaded.warnings == ()
    model = trace(loaded).model
    assert [n.op_type for n in model.graph.node] == ["Add"] and not model.functions


def test_a_graph_with_operators_nobody_has_can_be_looked_at(written: Callable[..., Path]) -> None:
    from linexport.inspection import inspect

    text = """<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[B, T, 2, 8] q, float[B, T, 2, 8] k) => (float[B, T, 2, 8] z) {
            one = Relu(q)
            other = Relu(k)
            y = Einsum <equation = "bthd,bshd,bshe->bthe"> (one, other, k)
            z = acme.Mystery(y)
        }"""
    path = written(text)
    found = inspect(path).to_json()
    assert [m["query_map"] for m in found["matches"]] == ["relu"]
    assert "acme.Mystery" in found["warnings"][0]
    with pytest.raises(LinexportError, match="Mystery"):
        load_model(path)


def test_operators_of_other_domains_are_named() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[n] x) => (float[n] y) { y = acme.Twice(x) }"""
    warnings = document.custom_operators(parser.parse_model(text))
    assert warnings == ("operators of other domains are kept as they are: acme.Twice",)
