"""``linexport linearize``: files, exit codes, one object of JSON, the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

import linexport
from linexport.manifest.linearization_records import LinearizationReport
from linexport.models import DigitClassifier, LanguageModel, save
from linexport.models.classifier import DigitClassifierConfig
from linexport.models.language_model import LanguageModelConfig
from linexport.models.training import train_digit_memory, train_digit_network
from linexport.report.linearization import linearization_page
from linexport.sources import load_model

Cli = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a digit classifier and its data."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = DigitClassifierConfig(dim=16, num_heads=2, layers=1, attention="softmax")
    save(DigitClassifier(config), tmp_path / "softmax.pt")
    np.savez(tmp_path / "rows.npz", np.random.default_rng(0).random((40, 16, 4), np.float32))
    return tmp_path


def quick(*arguments: object) -> tuple[object, ...]:
    return ("linearize", *arguments, "--no-bench", "--map", "taylor2")


def test_a_checkpoint_becomes_one_that_converts(folder: Path, cli: Cli) -> None:
    done = cli(*quick("softmax.pt", "-o", "linear.pt", "--data", "rows.npz", "--distil", 4))
    assert done.code == 0, done.err
    assert "written linear.pt" in done.out and "4/4" in done.err
    assert load_model("linear.pt").module.config["per_layer"][0]["feature_map"] == "taylor2"
    again = cli(*quick("softmax.pt", "-o", "linear.pt", "--data", "rows.npz", "--json"))
    assert again.code == 2 and "is there already" in again.json()["message"]


@pytest.mark.slow
def test_a_memory_is_answered_five_times_as_fast(folder: Path, cli: Cli) -> None:
    save(train_digit_memory(200), folder / "memory.pt")
    done = cli(
        *("linearize", "memory.pt", "-o", "fewer.pt2", "--threads", 1, "--json"),
        *("--data", "linexport.models.samples:questions", "--lengths", "64,1024"),
        *("--evaluate", "linexport.models.samples:memory_accuracy", "--max-drop", 0.03),
    )
    found = done.json()
    assert done.code == 0 and found["layers"][0]["pseudo_keys"] == 256
    assert found["layers"][0]["held_out_error"] < found["layers"][0]["mean_of_values_error"] / 4
    for row in found["latency"]:
        assert min(row["original_ms"], row["original_pytorch_ms"]) > 5 * row["linear_ms"]


def test_a_network_of_two_layers_is_judged_by_its_score(folder: Path, cli: Cli) -> None:
    save(train_digit_network(200), folder / "network.pt")
    asked = ("linearize", "network.pt", "--data", "linexport.models.samples:brightness")
    asked += ("--evaluate", "linexport.models.samples:network_accuracy", "--max-drop", 0.005)
    asked += ("--feed-forward", "least-squares", "--no-bench", "--json")
    done = cli(*asked, "-o", "linear.pt2")
    found = done.json()
    assert done.code == 3 and abs(found["metric"]["drop"]) <= 0.005 and found["layers"] == []
    assert found["verdict"].startswith("No: no feed-forward layer costs less than the one it")
    told = "1 feed-forward layer (hidden, with the layer after it) costs 11.1 times the multiply-"
    assert told in found["verdict"]
    forced = cli(*asked, "-o", "linear.pt2", "--force", "--overwrite")
    assert forced.code == 0 and forced.json()["forced"]
    (row,) = found["feed_forward"]
    assert (row["name"], row["activation"], row["degree"]) == ("hidden", "gelu", 2)
    assert row["multiply_adds"] > 10 * row["multiply_adds_before"]
    assert load_model("linear.pt2").module(torch.rand(3, 64)).shape == (3, 10)
    refused = cli(*asked, "-o", "linear.pt")
    assert refused.code == 2 and "name it linear.pt2" in refused.json()["message"]


@pytest.mark.slow
def test_a_factorys_module_becomes_a_program_that_converts(folder: Path, cli: Cli) -> None:
    asked = (
        "encoder_layer:make",
        "--data",
        "encoder_layer:rows",
        "--evaluate",
        "encoder_layer:size",
    )
    refused = cli(*quick(*asked, "-o", "linear.pt", "--json"))
    assert refused.code == 2 and "name it linear.pt2" in refused.json()["message"]
    done = cli(*quick(*asked, "-o", "linear.pt2", "--json"))
    found = done.json()
    assert done.code == 0 and found["metric"]["drop"] == -2 and found["output"] == "linear.pt2"
    manifest = linexport.convert("linear.pt2", "artifact", bench=False)
    assert manifest.status == "ok" and manifest.fused["LinearAttention"] == 1
    assert manifest.inputs[0].name == "tokens"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "none.npz"), "none.npz cannot be read as calibration data"),
        (("--data", "encoder_layer:none"), "there is no 'none'"),
        (("--data", "rows.npz", "--max-drop", 1), "--max-drop needs --evaluate"),
        (("--data", "rows.npz", "--evaluate", "encoder_layer:nothing"), "returned nan"),
        (("--data", "rows.npz", "--features", "many"), "expected a positive integer"),
        (("--data", "rows.npz", "--map-option", "tau"), "expected NAME=VALUE"),
    ],
)
def test_bad_requests_end_with_2_and_write_nothing(
    folder: Path, cli: Cli, arguments: tuple[object, ...], words: str
) -> None:
    done = cli(*quick("softmax.pt", "-o", "linear.pt", *arguments, "--json"))
    assert done.code == 2 and words in done.json()["message"]
    assert "Traceback" not in done.err and not Path("linear.pt").exists()


def test_a_model_without_softmax_attention_ends_with_4(folder: Path, cli: Cli) -> None:
    torch.manual_seed(0)
    save(DigitClassifier(DigitClassifierConfig(dim=16, num_heads=2, layers=1)), "elu.pt")
    done = cli(*quick("elu.pt", "-o", "linear.pt", "--data", "rows.npz", "--json"))
    assert done.code == 4 and "calls no softmax attention" in done.json()["message"]


@pytest.mark.slow
def test_a_form_that_is_never_faster_ends_with_3_and_is_drawn(folder: Path, cli: Cli) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig(dim=16, num_heads=2, layers=1, attention="softmax")
    save(LanguageModel(config), "lm.pt")
    np.savez("text.npz", np.random.default_rng(0).integers(256, size=(20, 8)))
    done = cli(
        *("linearize", "lm.pt", "-o", "linear.pt", "--data", "text.npz", "--map", "favor+"),
        "--force",
        *("--features", 512, "--lengths", "8,16", "--threads", 1, "--html", "page.html", "--json"),
    )
    found = done.json()
    assert done.code == 3 and found["status"] == "declined" and found["crossover"] is None
    slow = r"No: .*the linear form is not faster from 8 to 16 tokens: .* ms\."
    assert re.match(slow, found["verdict"])
    assert [row["length"] for row in found["latency"]] == [8, 16]
    assert found["memory"][0]["linear_mb"] is not None and Path("linear.pt").exists()
    text = Path("page.html").read_text()
    assert "<svg" in text and "blocks.0.attention" in text and "src=" not in text
    del found["output"]
    report = TypeAdapter(LinearizationReport).validate_python(
        {**found, "latency": None, "memory": None}
    )
    assert linearization_page(report).count("Not measured") == 2
    assert "Layers of a trained model were replaced" in linearization_page(report)
    none = linearization_page(replace(report, layers=()))
    assert "No layer was replaced" in none and "were replaced by" not in none
