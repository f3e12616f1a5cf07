"""A model named as on the hub is fetched where ``--download`` says so: data alone, one commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from linexport.conversion import pipeline
from linexport.errors import EnvironmentProblemError, UnsupportedModelError, UsageError
from linexport.sources import load_model
from linexport.sources.hugging_face import hub
from tests.support.hub import COMMIT, Hub, serve_hub

NAME = "someone/tiny-lfm"
OTHER_FILES = {
    "modeling_evil.py": "raise SystemExit",
    "pytorch_model.bin": "pickle",
    "README.md": "# a card",
    "consolidated.safetensors": "a second copy",
    "original/model.safetensors": "a third",
    "onnx/config.json": "{}",
}
TAKEN = {"config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"}


@pytest.fixture
def served(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """A hub with a tiny model and files that are not taken; an empty cache."""
    folder = shutil.copytree(model_folder("lfm2"), tmp_path / "repository")
    for name, text in OTHER_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with serve_hub(Hub(NAME, folder)) as one:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", one.address)
        files = f"{one.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield one


def fetched(revision: str | None = None, name: str = NAME) -> str:
    return hub.resolved(name, download=True, revision=revision, as_folder=False)


def test_data_is_fetched_and_nothing_else(served: Hub) -> None:
    assert fetched() == f"{NAME}@{COMMIT}"
    assert set(served.taken) == TAKEN
    loaded = load_model(NAME)
    assert loaded.source.location == f"{NAME}@{COMMIT}"
    assert loaded.source.kind == "hugging_face" and loaded.source.sha256


@pytest.mark.parametrize("revision", ["main", "v1", COMMIT])
def test_a_revision_is_pinned_to_its_commit(served: Hub, revision: str) -> None:
    assert fetched(revision) == f"{NAME}@{COMMIT}"
    assert fetched(name=f"{NAME}@{revision}") == f"{NAME}@{COMMIT}"


def test_a_moved_branch_leaves_the_pinned_commit(served: Hub) -> None:
    first = fetched()
    served.commit = "b" * 40
    assert fetched() == f"{NAME}@{'b' * 40}"
    assert hub.cached_folder(first).name == COMMIT
    assert hub.cached_folder(NAME).name == "b" * 40


def test_nothing_is_fetched_without_the_option(served: Hub) -> None:
    name = hub.resolved(NAME, download=False, revision=None, as_folder=False)
    with pytest.raises(
        UsageError, match=r"pass download=True to linexport convert, or run `hf down"
    ):
        load_model(name)
    assert not served.taken


def test_an_isolated_conversion_is_given_the_folder(served: Hub) -> None:
    folder = hub.resolved(NAME, download=True, revision=None, as_folder=True)
    assert Path(folder).name == COMMIT and (Path(folder) / "config.json").is_file()


@pytest.mark.parametrize("gone", ["model.safetensors"])
def test_pickles_are_refused_before_anything_is_fetched(served: Hub, gone: str) -> None:
    (served.folder / gone).unlink()
    with pytest.raises(UnsupportedModelError, match="its weights are pickles, which can run code"):
        fetched()
    assert not served.taken


def test_a_damaged_file_of_the_hub_is_refused_as_any_other(served: Hub) -> None:
    weights = served.folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UnsupportedModelError, match="damaged safetensors file"):
        load_model(fetched())


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ((403, "GatedRepo"), "Accept them on its page"),
        ((404, "RepoNotFound"), "The hub has no model someone/tiny-lfm, or it is private"),
        ((404, "RevisionNotFound"), "has no revision v9"),
        ((500, ""), "could not be fetched from http://127.0.0.1"),
    ],
)
def test_answers_of_the_hub_are_explained(
    served: Hub, status: tuple[int, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    served.status = status
    with pytest.raises((UsageError, EnvironmentProblemError), match=said):
        fetched("v9")


def test_without_a_network_the_error_names_the_place(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(EnvironmentProblemError, match=r"could not be fetched from http://127"):
        fetched()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentProblemError, match="HF_HUB_OFFLINE is set"):
        fetched()


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("model.pt", {"download": True}),
        ("package.module:build", {"revision": "main"}),
        (Path("some/folder"), {"download": True}),
        ("../some/folder", {"download": True}),
        ("a/b/c", {"download": True}),
    ],
)
def test_the_options_are_for_names_of_the_hub(source: Any, options: dict[str, Any]) -> None:
    given = {"download": False, "revision": None, **options}
    with pytest.raises(UsageError, match="is for a model of the Hugging Face hub"):
        hub.resolved(source, **given, as_folder=False)


def test_two_revisions_are_refused() -> None:
    with pytest.raises(UsageError, match="name two revisions"):
        hub.resolved(f"{NAME}@main", download=False, revision="v1", as_folder=False)


def test_the_artifact_is_named_after_the_model() -> None:
    assert pipeline.default_output(f"{NAME}@main") == Path("tiny-lfm.artifact")


@pytest.mark.services
def test_the_command_records_the_commit_and_validates_by_it(served: Hub, tmp_path: Path) -> None:
    own = {"HF_ENDPOINT": served.address, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "linexport", *words]
        done = subprocess.run(
            command, env={**os.environ, **own}, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("convert", NAME, "--download", "--no-bench")
    manifest = (tmp_path / "tiny-lfm.artifact" / "manifest.json").read_text()
    assert f'"location": "{NAME}@{COMMIT}"' in manifest
    served.status = (404, "RepoNotFound")
    run("validate", "tiny-lfm.artifact")
