"""Artifacts as the folders of other systems, each opened there."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml
from onnx import helper
from onnx.parser import parse_model

import linexport
from linexport.artifact import write
from linexport.errors import ParityError, UsageError
from linexport.graph.walk import nodes_within
from linexport.manifest import describe_files, read, to_json
from linexport.package import destinations, find_destination, package
from linexport.package.folder import RECORD
from linexport.package.lookups import expand_lookups
from linexport.package.standalone import rename_interface, rename_records
from linexport.serving.ray import Arguments
from linexport.system.escape import markdown
from linexport.targets.lowering.inlined import inlined
from tests.support.runtimes import session

pytestmark = pytest.mark.usefixtures("one_thread")


def feeds(artifact: Path) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 256, (2, 21))
    return linexport.load(artifact, threads=1).feeds(tokens)


def check_equal(artifact: Path, model: Path) -> None:
    """ONNX Runtime gives for a file what the artifact gives."""
    given, expected = (
        feeds(artifact),
        linexport.load(artifact, threads=1).run_graph(feeds(artifact)),
    )
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    assert {i.name for i in session.get_inputs()} == set(given)
    for output, got in zip(session.get_outputs(), session.run(None, given), strict=True):
        limit = 5e-5 * np.abs(expected[output.name]).max()
        np.testing.assert_allclose(got, expected[output.name], atol=limit)


@pytest.mark.parametrize("name", ["onnx", "ort-mobile"])
def test_one_file_without_functions(
    name: str, converted: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path
) -> None:
    artifact = converted("language_model")
    done = cli("package", artifact, "--for", name, "-o", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "out" / RECORD).read_text())["status"] == "ok"
    [model] = (tmp_path / "out").glob("model.*")
    check_equal(artifact, model)
    if name == "onnx":
        found = onnx.load(model)
        assert not found.functions and {n.domain for n in found.graph.node} <= {"", "com.microsoft"}
        assert all(n.name for n in found.graph.node)
        passed_through = {n.output[0] for n in found.graph.node if n.op_type == "Identity"}
        assert not passed_through & {o.name for o in found.graph.output}
    else:
        operators = (tmp_path / "out" / "required_operators_and_types.config").read_text()
        assert "ai.onnx" in operators and "MatMul" in operators


def test_conversion_without_functions(
    factories: Any, cli: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--target", "onnx", "--inline", "--no-bench", "--threads", 1)
    done = cli("convert", factories.source("small"), "-o", out, *options, "--json")
    assert done.code == 0, done.err
    found = onnx.load(out / "model.onnx")
    nodes = sum(1 for _ in nodes_within(found.graph.node))
    assert not found.functions and nodes == done.json()["nodes"]["artifact"]
    assert {o.domain for o in found.opset_import} == {""}
    known = {i.name for i in (*found.graph.value_info, *found.graph.output)}
    made = {name for n in found.graph.node for name in n.output if name}
    assert len(known & made) > 0.9 * len(made)
    x = np.random.default_rng(0).standard_normal((1, 9, 8)).astype(np.float32)
    stream, whole = linexport.load(out).stream(), linexport.load(out).run(x)["output"]
    steps = np.concatenate([stream.step(x[:, t : t + 1])["output"] for t in range(9)], 1)
    assert np.abs(steps - whole).max() < 1e-5
    assert cli("validate", out, "--source", factories.source("small"), "--threads", 1).code == 0


def test_functions_declare_the_inputs_that_a_node_gives(converted: Callable[..., Path]) -> None:
    """onnx's own evaluator wants all that are declared."""
    from onnx.reference import ReferenceEvaluator

    artifact = converted("language_model", target="onnx")
    model = onnx.load(artifact / "model.onnx")
    expected = linexport.load(artifact, threads=1).run_graph(feeds(artifact))
    got = ReferenceEvaluator(model).run(None, feeds(artifact))
    for output, value in zip(model.graph.output, got, strict=True):
        np.testing.assert_allclose(value, expected[output.name], rtol=1e-3, atol=1e-4)


def test_the_interface_gets_plain_names_that_do_not_collide() -> None:
    value = [helper.make_tensor_value_info(n, 1, [2]) for n in ("a.b", "a_b", "c/d")]
    nodes = [helper.make_node("Add", ["a.b", "a_b"], ["c/d"])]
    model = helper.make_model(helper.make_graph(nodes, "g", value[:2], value[2:]))
    assert rename_interface(model) == {"a.b": "a_b_2", "c/d": "c_d"}
    onnx.checker.check_model(model)
    assert rename_interface(inlined(model)) == {}


def test_renaming_reaches_subgraphs_and_avoids_the_names_within() -> None:
    """A branch reads the input ``my.in``; a value within is called ``my_in`` already."""
    model = parse_model(
        """<ir_version: 9, opset_import: ["" : 17]>
        g (float[n, 4] x) => (float[n, 4] y) <float zero = {0}> {
            x_in = Neg (x)
            total = ReduceSum <keepdims = 0> (x)
            positive = Greater (total, zero)
            y = If (positive) <
                then_branch = t () => (float[n, 4] a) { a = Add (x, x_in) },
                else_branch = e () => (float[n, 4] b) { b = Mul (x, x_in) }
            >
        }"""
    )
    rename(model, "x", "x.in")
    assert rename_interface(model) == {"x.in": "x_in_2"}
    opened = session(model)
    for value, expected in ((2.0, 0.0), (-2.0, -4.0)):
        (found,) = opened.run(None, {"x_in_2": np.full((3, 4), value, np.float32)})
        np.testing.assert_array_equal(found, np.full((3, 4), expected, np.float32))


def rename(model: onnx.ModelProto, old: str, new: str) -> None:
    """Names with dots cannot be written in the text form."""
    model.graph.input[0].name = new
    for node in nodes_within(model.graph.node):
        node.input[:] = [new if name == old else name for name in node.input]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [True, False])
def test_lookups_by_standard_operators(bits: int, zeros: bool) -> None:
    """Bit for bit what ONNX Runtime's own operator gives; rows have an odd number of blocks."""
    choose = np.random.default_rng(bits)
    rows, blocks, block = 11, 3, 32
    packed = [blocks * block * bits // 8, -(-blocks * bits // 8)]
    table, points = (choose.integers(0, 256, (rows, width), np.uint8) for width in packed)
    scales = choose.random((rows, blocks), np.float32)
    held = {"table": table, "scales": scales, **({"zeros": points} if zeros else {})}
    node = helper.make_node(
        "GatherBlockQuantized", ["table", "ids", "scales", *(["zeros"] if zeros else [])], ["out"],
        domain="com.microsoft", gather_axis=0, quantize_axis=1, bits=bits, block_size=block,
    )  # fmt: skip
    infos = [
        helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "length"]),
        helper.make_tensor_value_info("out", onnx.TensorProto.FLOAT, None),
    ]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph([node], "lookup", infos[:1], infos[1:], tensors)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    ids = {"ids": choose.integers(0, rows, (2, 5))}
    [wanted] = session(model).run(None, ids)
    expand_lookups(model)
    assert {n.domain for n in model.graph.node} == {""}
    np.testing.assert_array_equal(session(model).run(None, ids)[0], wanted)


def test_lookups_of_other_forms_stay() -> None:
    """A table that is a vector, and attributes that no kernel takes."""
    for dims, attributes in (([8], {}), ([4, 8], {"bits": 3}), ([4, 8], {"block_size": 0})):
        node = helper.make_node("GatherBlockQuantized", ["t", "i", "s"], ["o"], **attributes)
        table = onnx.numpy_helper.from_array(np.zeros(dims, np.uint8), "t")
        model = helper.make_model(helper.make_graph([node], "lookup", [], [], [table]))
        expand_lookups(model)
        assert list(model.graph.node) == [node]


def test_triton_repositories(converted: Callable[..., Path], tmp_path: Path) -> None:
    artifact = converted("language_model")
    packaged = package(artifact, find_destination("triton"), tmp_path / "a", name="lm")
    assert "older one may lack kernels" in packaged.notes[0]
    config = (tmp_path / "a" / "lm" / "config.pbtxt").read_text()
    states = read(artifact).states
    assert config.count("state [ {") == len(states) and "past_length" not in config
    pasts, presents = sorted(s.past for s in states), sorted(s.present for s in states)
    pairs = {s.past: s.present for s in states}
    assert [pairs[past] for past in pasts] == presents  # the server matches them by this order
    check_equal(artifact, tmp_path / "a" / "lm" / "1" / "model.onnx")
    triton = find_destination("triton")
    for options, message in (
        ({"backend": "tensorflow"}, "expected onnxruntime, tensorrt or python"),
        ({"decoupled": "true", "backend": "onnxruntime"}, "tokens are streamed"),
        ({"max-batch": "0"}, "expected a positive integer"),
        ({"colour": "red"}, "has no option 'colour'"),
    ):
        with pytest.raises(UsageError, match=message):
            package(artifact, triton, tmp_path / "b", name="lm", options=options)
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("backend", ["onnxruntime", "python"])
def test_names_are_neither_paths_nor_text_of_a_configuration(
    converted: Callable[..., Path], tmp_path: Path, backend: str
) -> None:
    """The server would run what a parameter of its configuration names.

    States have no other names than linexport's own: a manifest with others is refused.
    """
    parameter = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/evil" } }'
    artifact = Path(shutil.copytree(converted("language_model"), tmp_path / "artifact"))
    hostile = {"logits": "../../../../victim", "tokens": f'" }} ] {parameter} #'}
    model = onnx.load(artifact / "model.onnx")
    for infos in (model.graph.input, model.graph.output):
        for info in infos:
            info.name = hostile.get(info.name, info.name)
    for node in model.graph.node:
        node.input[:] = [hostile.get(n, n) for n in node.input]
        node.output[:] = [hostile.get(n, n) for n in node.output]
    onnx.save_model(model, artifact / "model.onnx")
    manifest = rename_records(read(artifact), hostile)
    files = describe_files(artifact)
    manifest = replace(manifest, files=files, model_sha256=files["model.onnx"].sha256 or "")
    (artifact / "manifest.json").write_text(json.dumps(to_json(manifest)))
    there = set(tmp_path.rglob("*"))
    option = {"backend": backend}
    package(artifact, find_destination("triton"), tmp_path / "out" / "in" / "deep", options=option)
    written = {p for p in tmp_path.rglob("*") if p not in there}
    assert all(p.is_relative_to(tmp_path / "out") for p in written)
    assert not any(p.name == "victim" for p in written)
    configuration = next(p for p in written if p.name == "config.pbtxt").read_text()
    assert "/evil" not in configuration and "EXECUTION_ENV_PATH" not in configuration.split('"')
    [file] = (p for p in written if p.name == "model.onnx")
    known = {i.name for i in onnxruntime.InferenceSession(file).get_inputs()}
    names = set(re.findall(r'(?m)^input \[ \{ name: "(\w+)"', configuration))
    assert names and names <= known


@pytest.mark.parametrize("destination", ["genai", "transformers.js"])
def test_other_systems_get_no_file_that_only_the_manifest_names(
    converted: Callable[..., Path], tmp_path: Path, destination: str
) -> None:
    """onnxruntime-genai loads the library that its configuration names."""
    artifact = Path(shutil.copytree(converted("language_model"), tmp_path / "artifact"))
    library = {"session_options": {"custom_ops_library": "evil.so"}}
    (artifact / "genai_config.json").write_text(json.dumps({"model": {"decoder": library}}))
    for name in ("evil.so", "modeling.py", "onnx", RECORD):
        (artifact / name).write_text("evil")
    settings = {"hidden_size": library, "max_position_embeddings": "many", "pad_token_id": [1]}
    (artifact / "config.json").write_text(json.dumps(settings))
    (artifact / "tokenizer_config.json").write_text("{}")
    manifest = replace(read(artifact), files=describe_files(artifact))
    (artifact / "manifest.json").write_text(json.dumps(to_json(manifest)))
    package(artifact, find_destination(destination), tmp_path / "out")
    made = {p.name for p in (tmp_path / "out").rglob("*") if p.is_file()}
    ours = {"genai": {"genai_config.json"}, "transformers.js": set()}[destination]
    assert made == {"model.onnx", "config.json", "tokenizer_config.json", RECORD} | ours
    for name in ours:
        assert "custom_ops_library" not in (tmp_path / "out" / name).read_text()


def test_an_earlier_folder_is_replaced_whole_or_not_at_all(
    converted: Callable[..., Path], tmp_path: Path
) -> None:
    artifact, place = converted("language_model"), tmp_path / "out"
    onnx_folder = find_destination("onnx")
    package(artifact, onnx_folder, place)
    with pytest.raises(UsageError, match="was packaged before"):
        package(artifact, onnx_folder, place)
    before = {p.name: p.read_bytes() for p in place.iterdir()}

    def fail(job: Any) -> Any:
        (job.folder / "half").write_text("")
        raise UsageError("no")

    with pytest.raises(UsageError, match=r"^no$"):
        package(artifact, replace(onnx_folder, write=fail), place, overwrite=True)
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    package(artifact, find_destination("triton"), place, name="lm", overwrite=True)
    assert {p.name for p in place.iterdir()} == {"lm", RECORD}
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_packaged(
    converted: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(converted("language_model"), artifact)
    manifest = replace(read(artifact), status="parity_failed")
    (artifact / "manifest.json").write_text(json.dumps(to_json(manifest)))
    with pytest.raises(ParityError, match="--allow-failed"):
        package(artifact, find_destination("onnx"), tmp_path / "out")
    package(artifact, find_destination("onnx"), tmp_path / "out", allow_failed=True)
    assert json.loads((tmp_path / "out" / RECORD).read_text())["status"] == "parity_failed"
    for arguments, message in (
        (("--for", "xbox", "-o", tmp_path / "x"), "Unknown destination 'xbox'; expected one of"),
        (("--for", "onnx", "-o", artifact), "is an artifact"),
        (("--for", "onnx", "-o", tmp_path / "x", "--name", "a/b"), "is not a name of letters"),
        (("--for", "onnx", "-o", tmp_path / "x", "--option", "x"), "expected NAME=VALUE"),
    ):
        done = cli("package", converted("language_model"), *arguments)
        assert done.code == 2 and message in " ".join(done.err.split()), done.err
    on_gpus = converted("language_model", target="ort-cuda")
    done = cli("package", on_gpus, "--for", "onnx", "-o", tmp_path / "x")
    assert done.code == 2 and "--target ort or --target onnx" in " ".join(done.err.split())
    assert not (tmp_path / "x").exists()
    assert {"genai", "onnx", "ort-mobile", "ray", "triton"} <= set(destinations())


def test_a_cluster_gets_a_file_that_names_the_artifact(
    converted: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path
) -> None:
    artifact = converted("language_model")
    given = ("slots=8", "threads=2", "min-replicas=3", "max-replicas=5")
    options = [part for one in given for part in ("--option", one)]
    done = cli("package", artifact, "--for", "ray", "-o", tmp_path / "out", "--name", "m", *options)
    assert done.code == 0, done.err
    config = yaml.safe_load((tmp_path / "out" / "serve.yaml").read_text())
    [application] = config["applications"]
    [model] = application["deployments"]
    assert application["import_path"] == "linexport.serving.ray:app"
    arguments = Arguments.read(application["args"])
    assert (arguments.artifact, arguments.name, arguments.threads) == (artifact, "m", 2)
    assert arguments.limits.slots == model["max_ongoing_requests"] == 8
    assert model["autoscaling_config"]["min_replicas"] == 3
    assert model["ray_actor_options"] == {"num_cpus": 2}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("slots=0", "slots=0: expected a positive integer"),
        ("max-replicas=many", "max-replicas=many: expected a positive"),
        ("artifact=elsewhere", "expected a path from /"),
        ("replicas=2", "ray has no option 'replicas'"),
    ],
)
def test_wrong_options_of_a_cluster_are_named(
    converted: Callable[..., Path],
    cli: Callable[..., Any],
    tmp_path: Path,
    option: str,
    words: str,
) -> None:
    artifact = converted("language_model")
    done = cli("package", artifact, "--for", "ray", "-o", tmp_path / "x", "--option", option)
    assert (done.code, words in " ".join(done.err.split())) == (2, True), done.err
    assert not (tmp_path / "x").exists()


def test_the_hub_gets_the_artifact_with_a_card(
    converted: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path
) -> None:
    from huggingface_hub import ModelCard, ModelCardData

    artifact, folder = converted("language_model"), tmp_path / "out"
    given = ("license=apache-2.0", "base-model=someone/original", "pipeline-tag=text-generation")
    options = [part for one in given for part in ("--option", one)]
    done = cli("package", artifact, "--for", "hub", "-o", folder, "--name", "small", *options)
    assert done.code == 0, done.err
    assert "hf upload ORG/small" in done.out + done.err
    card = ModelCard.load(folder / "README.md")
    assert isinstance(card.data, ModelCardData) and card.data.library_name == "linexport"
    assert card.data.license == "apache-2.0" and card.data.base_model == "someone/original"
    assert card.data.pipeline_tag == "text-generation" and "onnx" in card.data.tags
    manifest = read(artifact)
    assert str(manifest.environment["onnxruntime"]) in card.text
    assert f"{len(manifest.parity.cases)} of {len(manifest.parity.cases)} checks" in card.text
    assert manifest.source.sha256 is None or manifest.source.sha256 in card.text
    assert (
        str(Path(manifest.source.location).parent) in (".", "")
        or str(Path(manifest.source.location).parent) not in card.text
    )
    for name in (*manifest.files, "manifest.json", "report.html"):
        assert (folder / name).read_bytes() == (artifact / name).read_bytes()
    check_equal(folder, folder / "model.onnx")  # it is still an artifact


def test_a_name_of_the_hub_is_the_base_model(sample_manifest: Any) -> None:
    from linexport.package import hub
    from linexport.package.destination import Packaging

    place = f"someone/original@{'a' * 40}"
    source = replace(sample_manifest.source, kind="hugging_face", location=place)
    job = Packaging(Path(), replace(sample_manifest, source=source), Path(), "small", {})
    assert hub._metadata(job)["base_model"] == "someone/original"
    assert markdown(place) in "\n".join(hub._text(job))


@pytest.mark.parametrize(
    "option", ["license=Apache 2\nx: y", "base-model=nobody", "pipeline-tag=", "licence=mit"]
)
def test_wrong_options_of_a_card_are_named(
    converted: Callable[..., Path], cli: Callable[..., Any], tmp_path: Path, option: str
) -> None:
    artifact = converted("language_model")
    done = cli("package", artifact, "--for", "hub", "-o", tmp_path / "x", "--option", option)
    assert (done.code, option.partition("=")[0] in done.err) == (2, True), done.err
    assert not (tmp_path / "x").exists()


def test_help_names_every_destination(cli: Callable[..., Any]) -> None:
    text = cli("package", "--help").out
    assert all(name in text for name in destinations())


@pytest.mark.parametrize("destination", ["onnx", "transformers.js"])
def test_one_file_has_the_weights_that_an_artifact_has_beside_it(
    factories: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    destination: str,
) -> None:
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", 1000)
    source = tmp_path / "artifact"
    linexport.convert(factories.source("language_model"), source, bench=False, threads=1)
    assert (source / "model.onnx.data").exists()
    package(source, find_destination(destination), tmp_path / "package")
    [path] = (tmp_path / "package").rglob("*.onnx")
    assert not list((tmp_path / "package").rglob("*data"))
    onnxruntime.InferenceSession(path.read_bytes())
