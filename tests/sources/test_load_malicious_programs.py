"""Exported programs that would run code from the file are refused, and the code does not run.

Every payload creates the file `marker`. The tests named control show that the payloads work
against torch.export.load itself, so that a refusal is not owed to a payload that does nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from linexport.errors import UnsupportedModelError
from linexport.sources import load_model

Rewrite = Callable[..., Path]

TABLE = "data/weights/model_weights_config.json"


class Evil:
    """Unpickles to a call that creates the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def code(marker: Path) -> str:
    """Python source, of one expression, that creates the marker."""
    return f"__import__('pathlib').Path('{marker}').touch()"


def refused(path: Path, marker: Path, match: str = ".") -> str:
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        load_model(path)
    assert not marker.exists()
    assert str(path) in str(caught.value)
    return str(caught.value)


def graph_of(document: Any) -> Any:
    return document["graph_module"]["graph"]


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def table_with_pickle(member: str, name: str) -> bytes:
    meta = {"path_name": member, "is_param": False, "use_pickle": True, "tensor_meta": None}
    return json.dumps({"config": {name: meta}}).encode()


def open_with_torch(path: Path) -> None:
    """What a user without linexport would do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = torch.export.load(path).module()
            module(torch.ones(2, 6, 4), torch.ones(2, 6, dtype=torch.bool))
        except Exception:
            pass


# --- pickles -----------------------------------------------------------------------------------

WEIGHTS = "data/weights/"
CONSTANTS = "data/constants/"
PICKLES = {
    "example inputs": lambda evil: {"data/sample_inputs/model.pt": saved(evil)},
    "example inputs, raw": lambda evil: {"data/sample_inputs/model.pt": pickle.dumps(evil)},
    "nested in example inputs": lambda evil: {
        "data/sample_inputs/model.pt": saved(((torch.ones(2), evil), {}))
    },
    "weight": lambda evil: {
        f"{WEIGHTS}model_weights_config.json": table_with_pickle("weight_0", "w"),
        f"{WEIGHTS}weight_0": saved(evil),
    },
    "constant": lambda evil: {
        f"{CONSTANTS}model_constants_config.json": table_with_pickle("tensor_0", "offset"),
        f"{CONSTANTS}tensor_0": saved(evil),
    },
    "opaque object": lambda evil: {
        f"{CONSTANTS}model_constants_config.json": table_with_pickle("opaque_obj_0", "c"),
        f"{CONSTANTS}opaque_obj_0": pickle.dumps(evil),
    },
    "old weights": lambda evil: {f"{WEIGHTS}model.pt": saved(evil)},
    "old constants": lambda evil: {f"{CONSTANTS}model.pt": saved(evil)},
}


@pytest.mark.parametrize("place", PICKLES)
def test_pickles_are_refused(rewrite: Rewrite, marker: Path, place: str) -> None:
    refused(rewrite(PICKLES[place](Evil(marker))), marker)


@pytest.mark.parametrize("place", PICKLES)
def test_control_pickles_run_in_torch(rewrite: Rewrite, marker: Path, place: str) -> None:
    open_with_torch(rewrite(PICKLES[place](Evil(marker))))
    assert marker.exists()


def test_the_import_of_a_pickle_is_named(rewrite: Rewrite, marker: Path) -> None:
    path = rewrite(PICKLES["nested in example inputs"](Evil(marker)))
    assert "pathlib.Path.touch" in refused(path, marker) or "getattr" in refused(path, marker)


def test_custom_objects_are_refused(rewrite: Rewrite, marker: Path) -> None:
    refused(rewrite({f"{CONSTANTS}custom_obj_0": b"x"}), marker, "pickled object")


def test_old_format_hidden_beside_the_new_one(pt2: Path, rewrite: Rewrite, marker: Path) -> None:
    """torch.export.load falls back to it when the new one fails, with another zip parser."""

    def break_graph(document: Any) -> None:
        graph_of(document)["outputs"][0]["as_tensor"]["name"] = "absent"
        graph_of(document)["nodes"][0]["inputs"][0]["arg"] = {"as_tensor": {"name": "absent"}}

    path = rewrite(edit=break_graph)
    refused(path, marker, "torch could not rebuild")
    with zipfile.ZipFile(pt2) as archive:
        program = archive.read("tiny/models/model.json")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("version", "8.20")
        archive.writestr("serialized_exported_program.json", program)
        archive.writestr("serialized_state_dict.pt", b"")
        archive.writestr("serialized_example_inputs.pt", b"")
        archive.writestr("serialized_constants.pt", saved(Evil(marker)))
    refused(path, marker)
    open_with_torch(path)
    assert marker.exists()  # the control


# --- strings that reach eval or exec -----------------------------------------------------------


def set_size(document: Any, text: str) -> None:
    values = graph_of(document)["tensor_values"]
    values["x"]["sizes"][0] = {"as_expr": {"expr_str": text, "hint": None}}


def set_guard(document: Any, text: str) -> None:
    document["guards_code"] = [text]


def set_quoted_guard(document: Any, text: str) -> None:
    """Break out of the double quotes around the guard in its own error message."""
    start = text.index("__import__")
    set_guard(document, text[:start] + text[start:].replace("'", '"', 4))


def set_node_name(document: Any, text: str) -> None:
    """Rename a value wherever it stands, as torch checks that names agree."""
    renamed = json.loads(json.dumps(document).replace('"linear"', json.dumps(text)))
    document.clear()
    document.update(renamed)


def set_input_name(document: Any, text: str) -> None:
    renamed = json.loads(json.dumps(document).replace('"flags"', json.dumps(text)))
    document.clear()
    document.update(renamed)


def set_argument_name(document: Any, text: str) -> None:
    node = graph_of(document)["nodes"][0]
    node["target"] = "torch.ops.higher_order.scan"
    node["inputs"][0] |= {"name": text, "kind": 2}


def set_parameter(document: Any, text: str) -> None:
    for spec in document["graph_module"]["signature"]["input_specs"]:
        if "tensor_constant" in spec:
            spec["tensor_constant"]["tensor_constant_name"] = text


def set_forward_name(document: Any, text: str) -> None:
    document["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [text, "y"]


def set_target(document: Any, text: str) -> None:
    node = graph_of(document)["nodes"][0]
    node["target"] = text


def set_operator_argument(document: Any, text: str) -> None:
    graph_of(document)["nodes"][0]["inputs"][0]["arg"] = {"as_operator": text}


def set_range(document: Any, text: str) -> None:
    document["range_constraints"][text] = {"min_val": 2, "max_val": 4}


def set_input_keys(document: Any, text: str) -> None:
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    version, spec = json.loads(signature["in_spec"])
    spec["children_spec"][1]["context"] = json.dumps([text])
    spec["children_spec"][1]["children_spec"] = [spec["children_spec"][0]["children_spec"].pop()]
    signature["in_spec"] = json.dumps([version, spec])


STRINGS = [
    set_size,
    set_guard,
    set_node_name,
    set_input_name,
    set_argument_name,
    set_parameter,
    set_forward_name,
    set_target,
    set_operator_argument,
    set_range,
    set_input_keys,
]
WRAPPINGS = ["{}", "x if {} else y", 'x"), {}, ("', "x=[{}]", "x\n{}", "L['x'].size()[{}]"]


@pytest.mark.parametrize("setter", STRINGS)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_code_in_strings_is_refused(
    rewrite: Rewrite, marker: Path, code: str, setter: Callable[..., None], wrapping: str
) -> None:
    refused(rewrite(edit=lambda document: setter(document, wrapping.format(code))), marker)


@pytest.mark.parametrize(
    ("setter", "wrapping"),
    [
        (set_size, "{}"),
        (set_guard, "{}"),
        (set_quoted_guard, "L['x'].size()[0] != 'a\" + str({}) + \"b'"),
        (set_input_name, "flags=[{}]"),
    ],
)
def test_control_code_in_strings_runs_in_torch(
    rewrite: Rewrite, marker: Path, code: str, setter: Callable[..., None], wrapping: str
) -> None:
    path = rewrite(edit=lambda document: setter(document, wrapping.format(code)))
    open_with_torch(path)
    assert marker.exists()
    marker.unlink()
    refused(path, marker)


# --- names that torch resolves -----------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system", "torch.hub.load", "torch.load", "torch.ops.load_library",
        "torch.ops.aten.save.default", "torch.ops.aten.from_file.default",
        "torch.ops.aten.add.Tensor.__class__", "torch.ops.aten.__class__.mro",
        "torch.ops.aten.add.nothing", "torch.ops.mine.op.default",
        "torch.ops.higher_order.call_torchbind", "torch.ops.higher_order.run_const_graph",
        "torch.ops.inductor._alloc_from_pool.default", "_operator.methodcaller", "_operator.call",
        "math.sys", "os.system", "#extension:op", "",
    ],
)  # fmt: skip
def test_targets_other_than_operators_are_refused(
    rewrite: Rewrite, marker: Path, target: str
) -> None:
    refused(rewrite(edit=lambda document: set_target(document, target)), marker, "it calls")


LEAF = {"type": None, "context": None, "children_spec": []}
ENUM = {"__enum__": True, "fqn": "antigravity:x", "name": "y"}
FACTORY = {"default_factory_module": "os", "default_factory_name": "abort", "dict_context": []}


@pytest.mark.parametrize(
    "spec",
    [
        {"type": "builtins.dict", "context": json.dumps([ENUM]), "children_spec": [LEAF]},
        {"type": "builtins.tuple", "context": json.dumps(ENUM), "children_spec": []},
        {"type": "collections.defaultdict", "context": json.dumps(FACTORY), "children_spec": []},
        {"type": "collections.namedtuple", "context": '"x"', "children_spec": []},
        {"type": "builtins.dict", "context": '["a"]', "children_spec": []},
        {"type": None, "context": "null", "children_spec": []},
        {},
        7,
    ],
)
@pytest.mark.parametrize("field", ["in_spec", "out_spec"])
def test_nested_types_that_import_are_refused(
    rewrite: Rewrite, marker: Path, field: str, spec: Any
) -> None:
    def edit(document: Any) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature[field] = json.dumps([1, spec])

    refused(rewrite(edit=edit), marker)


# --- files inside the archive ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "match"),
    [
        ("data/aotinductor/model/x.so", "compiled native code"),
        ("data/weights/../../../x", "a name that torch does not write"),
        ("data/weights/\u202ex", "a name that torch does not write"),
        ("models/other.json", "several programs"),
        ("notes.txt", "none that torch.export.save writes"),
    ],
)
def test_unexpected_members_are_refused(
    rewrite: Rewrite, marker: Path, member: str, match: str
) -> None:
    refused(rewrite({member: b"x"}), marker, match)


def test_archives_that_two_readers_see_differently(pt2: Path, tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "twice.pt2"
    path.write_bytes(pt2.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("tiny/models/model.json", b"{}")
    refused(path, marker, "same name")


def test_names_that_torch_cannot_decode_are_refused(
    pt2: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reader:
        def __init__(self, path: object) -> None: ...

        def get_all_records(self) -> None:
            b"\x96".decode()

    monkeypatch.setattr(torch._C, "PyTorchFileReader", Reader)
    refused(pt2, marker, "cannot read the zip archive")


def test_compressed_members_are_refused(pt2: Path, tmp_path: Path, marker: Path) -> None:
    path = tmp_path / "bomb.pt2"
    with (
        zipfile.ZipFile(pt2) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in source.namelist():
            archive.writestr(name, source.read(name))
        archive.writestr("tiny/data/weights/weight_9", bytes(10**7))
    refused(path, marker, "compressed")


def test_weights_larger_than_their_bytes_are_refused(rewrite: Rewrite, marker: Path) -> None:
    dims = [{"as_int": 10**6}, {"as_int": 10**6}]
    for strides, match in (([10**6, 1], "needs 4000000000000 bytes"), ([0, 0], "expands to")):
        meta = {
            "dtype": 7, "sizes": dims, "strides": [{"as_int": s} for s in strides],
            "storage_offset": {"as_int": 0}, "requires_grad": False, "layout": 7,
            "device": {"type": "cpu", "index": None},
        }  # fmt: skip
        entry = {"path_name": "weight_0", "is_param": True, "use_pickle": False}
        table = {"config": {"w": entry | {"tensor_meta": meta}}}
        members = {f"{WEIGHTS}model_weights_config.json": json.dumps(table).encode()}
        refused(rewrite(members), marker, match)


@pytest.mark.parametrize("value", [True, 7, None, ["weight_0"], {}])
@pytest.mark.parametrize("field", ["path_name", "tensor_meta", "config"])
def test_a_table_of_weights_with_values_of_another_type_is_refused(
    rewrite: Rewrite, pt2: Path, marker: Path, field: str, value: object
) -> None:
    reader = torch.export.pt2_archive.PT2ArchiveReader(str(pt2))
    table = json.loads(reader.read_bytes(TABLE))
    if field == "config":
        table["config"] = value
    else:
        next(iter(table["config"].values()))[field] = value
    path = rewrite({TABLE: json.dumps(table).encode()})
    if (field, value) == ("config", {}):  # no weights: torch says so
        refused(path, marker)
    else:
        refused(path, marker, "damaged|points elsewhere|stored as a pickle|has text in")


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda d: d["schema_version"].update(major=99), "schema version is 99"),
        (lambda d: d.pop("graph_module"), "damaged"),
        (lambda d: graph_of(d).update(nodes="x"), "text in Graph.nodes"),
        (lambda d: graph_of(d).update(nodes=7), "damaged|rebuild"),
        (lambda d: graph_of(d).update(is_single_tensor_return="yes"), "text in"),
        (lambda d: set_target(d, ["x"]), "damaged|rebuild"),
    ],
)
def test_damaged_documents_are_refused(
    rewrite: Rewrite, marker: Path, edit: Any, match: str
) -> None:
    refused(rewrite(edit=edit), marker, match)


def test_programs_on_other_devices_say_how_to_move_them(rewrite: Rewrite, marker: Path) -> None:
    def edit(document: Any) -> None:
        graph_of(document)["tensor_values"]["x"]["device"]["type"] = "cuda"

    refused(rewrite(edit=edit), marker, "move_to_device_pass")


def test_string_inputs_are_refused(rewrite: Rewrite, marker: Path, code: str) -> None:
    for inputs in (((code,), {}), ((torch.ones(2), {code: torch.ones(2)}), {}), ((), {code: 1})):
        refused(rewrite({"data/sample_inputs/model.pt": saved(inputs)}), marker)


# --- everywhere --------------------------------------------------------------------------------


def strings_of(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Paths of all strings and keys; ("key", k) at the end of a path means the key itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(value, dict):
            yield (*path, ("key", key))
        if isinstance(item, str):
            yield (*path, key)
        elif isinstance(item, dict | list):
            yield from strings_of(item, (*path, key))


def set_at(document: Any, path: tuple[Any, ...], text: str) -> None:
    for key in path[:-1]:
        document = document[key]
    last = path[-1]
    if isinstance(last, tuple):
        document[text] = document.pop(last[1])
    else:
        document[last] = text


def test_code_in_any_string_never_runs(
    pt2: Path, rewrite: Rewrite, marker: Path, code: str
) -> None:
    """Every string of the document in turn; free text may pass, and is then seen to be inert."""
    with zipfile.ZipFile(pt2) as archive:
        document = json.loads(archive.read("tiny/models/model.json"))
    # One of each kind of place: what stands deeper or beside it is read by the same code.
    places = {
        tuple(key if isinstance(key, str) else type(key) for key in path[-2:]): path
        for path in strings_of(document)
    }
    passed = set()
    for path in places.values():
        file = rewrite(edit=lambda document, path=path: set_at(document, path, code))
        try:
            loaded = load_model(file)
        except UnsupportedModelError:
            continue
        with contextlib.suppress(RuntimeError, NameError):  # no equation, no such input
            loaded.module(*loaded.args)
        assert not marker.exists(), path
        if isinstance(path[-1], str):  # renamed keys are keys that torch does not read
            passed.add(path[-1])
    assert passed == {"as_string", "stack_trace", "torch_fn"}
