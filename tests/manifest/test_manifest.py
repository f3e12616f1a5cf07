"""The manifest: its schema, its versions, and what becomes of one that is damaged."""

from __future__ import annotations

import inspect
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import linexport
from linexport import manifest as manifests
from linexport import targets
from linexport.cli import app
from linexport.cli import options as cli_options
from linexport.errors import UsageError
from linexport.manifest import (
    ConvertOptions,
    Manifest,
    from_json,
    json_text,
    options,
    schema,
    to_json,
)
from linexport.option_names import shown


def test_the_published_schema_is_current() -> None:
    published = Path(schema.__file__).with_name("schema.json").read_text()
    assert published == schema.json_schema()


def test_json_and_back_is_the_same(sample_manifest: Manifest) -> None:
    assert from_json(to_json(sample_manifest)) == sample_manifest


def test_numbers_that_are_not_finite_are_null_and_come_back_as_none(
    sample_manifest: Manifest,
) -> None:
    parity = sample_manifest.parity
    assert parity is not None
    wild = replace(sample_manifest, parity=replace(parity, max_relative_error=float("inf")))
    again = from_json(json.loads(manifests.dumps(to_json(wild))))
    assert again.parity == replace(parity, max_relative_error=None)


def test_a_manifest_of_format_2_is_read(sample_manifest: Manifest) -> None:
    """Format 3 has more keys, each of which may be missing."""
    earlier = {**to_json(sample_manifest), "format": 2}
    del earlier["token_flow"]
    assert from_json(earlier) == replace(sample_manifest, token_flow=None)
    with pytest.raises(UsageError, match="reads 2 and 3"):
        from_json({**earlier, "format": 4})


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("dims", "seq", "min"), 1.5, r"\$\.dims\.seq\.min is 1\.5; expected a valid integer"),
        (("inputs", 0, "shape", 0), 1.5, r"\$\.inputs\[0\]\.shape\[0\] is 1\.5; expected a valid"),
        (
            ("status",),
            "good",
            r"\$\.status is \"good\"; expected 'ok', 'parity_failed' or 'quantisation_failed'",
        ),
        (("parity", "cases", 3, "nan"), None, r"\$\.parity\.cases\[3\]\.nan is null; expected an"),
        (("warnings",), "w" * 999, r"\$\.warnings is \"w{59}\.\.\.; expected a valid"),
    ],
)
def test_the_error_names_place_found_and_expected(
    sample_manifest: Manifest, path: tuple[Any, ...], value: Any, words: str
) -> None:
    content: Any = to_json(sample_manifest)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(UsageError, match=words):
        from_json(content, "a/manifest.json")


@pytest.mark.parametrize(
    ("key", "left", "words"),
    [
        ("target", None, r"\$\.target is missing\. Convert"),
        ("quantisation", {"weights": "int4"}, r"\$\.quantisation\.\w+ is missing\. Convert"),
    ],
)
def test_the_error_names_what_is_missing(
    sample_manifest: Manifest, key: str, left: object, words: str
) -> None:
    content = to_json(sample_manifest)
    del content[key]
    with pytest.raises(UsageError, match=words):
        from_json(content if left is None else {**content, key: left}, "a/manifest.json")


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[1e999]", "too large"),
        ("[" + "9" * 5000 + "]", "does not fit in 64 bits"),
        ('{"a": tru}', "Expecting value"),
    ],
)
def test_text_that_is_no_standard_json_is_one_error(damaged: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        json_text.loads(damaged)


# Options -----------------------------------------------------------------------------------------

OTHER: dict[str, Any] = {
    "target": "onnx",
    "precision": "bf16",
    "weights": "int4",
    "data": "a folder",
    "max_kld": 0.02,
    "evaluate": "scores:accuracy",
    "lower_is_better": True,
    "max_drop": 0.01,
    "sms": (89, 120),
    "plugins": False,
    "proof": "layers",
    "inline": True,
    "packed_batches": True,
    "pooling": "mean",
    "quick": True,
    "timing_cache": "a cache",
    "dump_passes": "graphs",
    "stop_after": "simplify",
    "dims": ("seq=1:8:64", "batch=1:2:3"),
    "tune": True,
    "bench": "none",
    "state_dict": "weights.pt",
    "inputs": ("x=float32[2,16,64]", "mask=bool[2,16]"),
    "lengths": (8, 33),
    "threads": 3,
    "seed": -7,
    "overwrite": True,
    "trust_remote_code": True,
    "download": True,
    "revision": "a revision",
    "stand_ins": True,
    "vision": False,
    "mtp": False,
    "isolated": True,
    "max_memory": 4,
    "max_seconds": 60,
    "max_file": 2,
}
"""A value beside the default for every option."""


def test_every_option_survives_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As given to Python, printed as a command, parsed again by the program."""
    assert set(OTHER) == set(options.declared())
    assert not [n for n, v in OTHER.items() if v == options.defaults()[n]]
    seen: list[ConvertOptions] = []

    def convert(source: str, output: Path, progress: Any, **given: Any) -> None:
        assert (source, str(output)) == ("a model.pt", "the artifact")
        seen.append(ConvertOptions(**given))
        raise UsageError("that is enough")

    monkeypatch.setattr("linexport.conversion.pipeline.convert", convert)
    single = [{name: value} for name, value in OTHER.items()]
    for given in ({}, OTHER, *single):
        asked = ConvertOptions(**given)
        _, name, *words = shlex.split(options.command("a model.pt", "the artifact", asked))
        assert name == "convert"
        with pytest.raises(SystemExit):
            app(["convert", *words])
        assert seen.pop() == asked


OF_THE_SOURCE = ("source", "output", "args", "kwargs", "dynamic_shapes", "progress")


def test_the_signature_and_the_docstring_of_convert_have_every_option() -> None:
    taken = inspect.signature(linexport.convert).parameters
    own = [name for name in taken if name not in OF_THE_SOURCE]
    assert {name: taken[name].default for name in own} == options.defaults()
    assert own == list(options.defaults())
    text = " ".join(str(linexport.convert.__doc__).split())
    for name, option in options.declared().items():
        assert f"{name}: {shown(option.help)}" in text
    with pytest.raises(TypeError, match="typo"):
        linexport.convert("a", "b", typo=1)


def test_the_help_names_the_registered_targets() -> None:
    assert cli_options.target_names() == sorted(targets.listings())
    assert sorted(get_args(options.TargetName)) == sorted(targets.listings(others=False))


def test_paths_and_lists_are_kept_as_text_and_tuples() -> None:
    asked = ConvertOptions(timing_cache=Path("x"), sms=[89], dims=iter(["a=1:2:3"]))  # type: ignore[arg-type]
    assert asked == ConvertOptions(timing_cache="x", sms=(89,), dims=("a=1:2:3",))
