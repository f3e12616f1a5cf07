"""Models with a vision tower, beside transformers called with pixel values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

import linexport
from linexport.artifact.text.images import image_inputs, images_of
from linexport.errors import UsageError
from linexport.manifest.records import InputRecord, TensorRecord, VisionRecord
from linexport.package import find_destination, package
from linexport.sources import load_model
from linexport.sources.hugging_face.vision.grid import draw
from tests.support.families import TINY, save_model
from tests.support.towers import IMAGE, WITH_PICTURES

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = list(WITH_PICTURES)


@pytest.fixture(scope="session")
def vision_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``vision_folder(model_type)``: such a model, whose tower matters, made once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save_model(WITH_PICTURES[kind], kind, made[kind], "AutoModelForImageTextToText")
            model = transformers.AutoModelForImageTextToText.from_pretrained(made[kind])
            with torch.no_grad():  # random weights of 0.02 give features that change nothing
                for name, weight in model.named_parameters():
                    if weight.ndim > 1 and "language_model" not in name and "lm_head" not in name:
                        weight *= 5
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def converted(
    vision_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def convert(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            place = tmp_path_factory.mktemp("artifacts") / kind
            manifest = linexport.convert(vision_folder(kind), place, bench=False, threads=1)
            made[kind] = place, manifest
        return made[kind]

    return convert


def library(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()


def as_processed(kind: str, images: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """What the image processor of the model gives for such patches."""
    if kind != "lfm2_vl":
        return {
            "pixel_values": torch.cat([pixels for pixels, _ in images]),
            "image_grid_thw": torch.tensor([[1, *grid.tolist()] for _, grid in images]),
        }
    longest = max(len(pixels) for pixels, _ in images) + 4
    padded = [torch.nn.functional.pad(p, (0, 0, 0, longest - len(p)), value=9.0) for p, _ in images]
    return {
        "pixel_values": torch.stack(padded),
        "spatial_shapes": torch.stack([grid for _, grid in images]),
        "pixel_attention_mask": torch.tensor(
            [[1] * len(p) + [0] * (longest - len(p)) for p, _ in images]
        ),
    }


def native(kind: str, ids: torch.Tensor, processed: dict[str, Any]) -> dict[str, Any]:
    types = {} if kind == "lfm2_vl" else {"mm_token_type_ids": (ids == IMAGE).int()}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **processed, **types}


def prompt(*sizes: int) -> list[int]:
    ids = [5, 9]
    for size in sizes:
        ids += [IMAGE] * size + [7, 11]
    return ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_gives_what_the_library_gives_at_every_grid(
    vision_folder: Callable[[str], Path], kind: str
) -> None:
    """In float64, where what float32 loses differs by processor: up to 2e-5 of the largest."""
    vision = load_model(vision_folder(kind)).vision
    assert vision is not None
    model, tower = library(vision_folder(kind)).double(), vision.module.double()
    sizes = [(1, 1), (2, 3), (1, 9), (7, 2), (17, 12)]
    drawn = (draw(vision, *size, seed) for seed, size in enumerate(sizes))
    images = [(pixels.double(), grid) for pixels, grid in drawn]
    with torch.no_grad():
        expected = model.get_image_features(**as_processed(kind, images)).pooler_output
        for (rows, columns), image, values in zip(sizes, images, expected, strict=True):
            got = tower(*image)
            assert got.shape == (rows * columns, 32)
            np.testing.assert_allclose(got, values, atol=1e-5 * float(values.abs().max()))


@pytest.mark.parametrize("kind", ["qwen3_5", "lfm2_vl"])
def test_the_traced_module_gives_the_logits_of_pixel_values(
    vision_folder: Callable[[str], Path], kind: str
) -> None:
    folder = vision_folder(kind)
    loaded = load_model(folder)
    step, vision = loaded.decode_module, loaded.vision
    assert step is not None and vision is not None
    images = [draw(vision, 2, 3, 0), draw(vision, 4, 1, 1)]
    ids = torch.tensor([prompt(6, 4)])
    with torch.no_grad():
        expected = library(folder)(**native(kind, ids, as_processed(kind, images))).logits
        words = library(folder)(input_ids=ids).logits
        features = {"image_features": np.zeros(0)}
        record = VisionRecord(
            *("", IMAGE, vision.merge, vision.grid_positions),
            inputs=(
                InputRecord("p", "float32", ("n", vision.channels)),
                InputRecord("g", "int64", (2,)),
            ),
            outputs=(TensorRecord("image_features", "float32", ("n", 32)),),
        )

        def encode(fed: Any) -> Any:
            features["image_features"] = vision.module(
                torch.from_numpy(fed["p"]), torch.from_numpy(fed["g"])
            ).numpy()
            return features

        arrays = images_of(as_processed(kind, images))
        given = image_inputs(record, encode, ids.numpy(), arrays)
        past = {s.past.removeprefix("past_"): torch.from_numpy(s.start(1)) for s in step.states}
        names = ["inputs_embeds", "embeds_mask", "position_offsets"][: len(given)]
        tensors = [torch.from_numpy(given[name]) for name in names]
        with step.patched():
            got = step.module(ids, torch.ones_like(ids), *tensors, past)[0]
    limit = 5e-5 * float(expected.abs().max())
    assert float((got - expected).abs().max()) < limit
    assert float((words - expected).abs().max()) > 1000 * limit  # the images matter


@pytest.mark.services
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_5",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5_moe", "lfm2_vl")),
    ],
)
def test_images_in_plain_onnxruntime_and_generate_as_transformers_does(
    vision_folder: Callable[[str], Path], converted: Callable[..., Any], kind: str
) -> None:
    folder, (place, manifest) = vision_folder(kind), converted(kind)
    assert manifest.status == "ok" and manifest.streaming.passed
    assert manifest.vision.file == "vision.onnx" in manifest.files
    names = {case.output for case in manifest.parity.cases}
    assert names == {"image_features", "logits"} and not manifest.warnings
    vision = load_model(folder).vision
    images = [draw(vision, 3, 2, 5), draw(vision, 1, 5, 6)]
    ids, processed = torch.tensor([prompt(6, 5)]), as_processed(kind, images)
    model, artifact = library(folder), linexport.load(place, threads=1)
    with torch.no_grad():
        expected = model(**native(kind, ids, processed)).logits.numpy()
    limit = 5e-5 * np.abs(expected).max()

    tower = onnxruntime.InferenceSession(place / "vision.onnx")
    features = [
        tower.run(None, {"pixel_values": p.numpy(), "grid": g.numpy()})[0] for p, g in images
    ]
    given = artifact.image_inputs(ids.numpy(), processed)
    np.testing.assert_array_equal(
        given["inputs_embeds"][ids.numpy() == IMAGE], np.concatenate(features)
    )
    session = onnxruntime.InferenceSession(place / "model.onnx")
    state = {s.past: s.start(1) for s in artifact.states.values()}
    mask = np.ones_like(ids.numpy())
    got = session.run(
        ["logits"], {"input_ids": ids.numpy(), "attention_mask": mask, **given, **state}
    )
    assert np.abs(got[0] - expected).max() < limit

    stream = artifact.stream()
    parts = []
    for start, stop in ((0, 4), (4, 11), (11, 12), (12, 13), (13, ids.shape[1])):
        piece = {name: values[:, start:stop] for name, values in given.items()}
        parts.append(stream.step(ids[:, start:stop].numpy(), **piece)["logits"])
    assert np.abs(np.concatenate(parts, 1) - expected).max() < limit

    written = model.generate(
        **native(kind, ids, processed), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    wanted = written[0, ids.shape[1] :].tolist()
    assert list(artifact.generate(ids[0], images=processed, max_tokens=24, stop=[])) == wanted
    text = torch.tensor([[5, 7, 11]])
    written = model.generate(input_ids=text, max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert list(artifact.generate(text[0], max_tokens=9, stop=[])) == written[0, 3:].tolist()


@pytest.mark.services
def test_pictures_prepared_by_the_processor_of_transformers(
    vision_folder: Callable[[str], Path], converted: Callable[..., Any]
) -> None:
    """Its variant on PIL; that of ``lfm2_vl`` needs torchvision."""
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = pytest.importorskip("PIL.Image")
    random = np.random.default_rng(0)
    pictures = [
        image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8))
        for size in ((37, 61), (50, 22))
    ]
    processor = processing.Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=2, merge_size=2, min_pixels=64, max_pixels=4096
    )
    processed = processor(images=pictures, return_tensors="np")
    ids = prompt(*(int(grid.prod()) // 4 for grid in processed["image_grid_thw"]))
    artifact = linexport.load(converted("qwen3_5")[0], threads=1)
    tensors = {name: torch.from_numpy(np.asarray(values)) for name, values in processed.items()}
    written = library(vision_folder("qwen3_5")).generate(
        **native("qwen3_5", torch.tensor([ids]), tensors),
        **{"max_new_tokens": 16, "do_sample": False, "eos_token_id": None},
    )
    wanted = written[0, len(ids) :].tolist()
    assert list(artifact.generate(ids, images=processed, max_tokens=16, stop=[])) == wanted


@pytest.mark.services
def test_what_goes_with_a_tower(
    vision_folder: Callable[[str], Path], converted: Callable[..., Any], tmp_path: Path
) -> None:
    place, _ = converted("qwen3_5")
    assert linexport.validate(place, threads=1, seed=3).vision is not None
    small = linexport.quantize(place, tmp_path / "small", weights="int8", threads=1)
    assert small.status == "ok" and "vision.onnx" in small.files
    artifact, vision = (
        linexport.load(tmp_path / "small", threads=1),
        load_model(vision_folder("qwen3_5")).vision,
    )
    processed = as_processed("qwen3_5", [draw(vision, 2, 2, 0)])
    assert len(list(artifact.generate(prompt(4), images=processed, max_tokens=3, stop=[]))) == 3
    with artifact.pool(slots=2) as pool:
        given = artifact.image_inputs(np.array(prompt(4)), processed)
        session = pool.open()
        session.push(np.array([prompt(4)]), **given)
        words = pool.open()
        words.push(np.array([prompt(4)]))
        advanced = pool.advance()
    logits = advanced[session]["logits"]
    assert np.abs(advanced[words]["logits"] - logits).max() > 1e-3
    again = artifact.run(np.array([prompt(4)]), **given)["logits"]
    np.testing.assert_allclose(logits, again, atol=1e-5)
    with pytest.raises(UsageError, match=r"onnx takes text alone.*vision=False"):
        package(place, find_destination("onnx"), tmp_path / "packaged")
    path = place / "vision.onnx"
    saved = path.read_bytes()
    path.write_bytes(saved[:-1])
    with pytest.raises(UsageError, match=r"vision\.onnx is damaged"):
        linexport.load(place)
    path.write_bytes(saved)


@pytest.mark.services
def test_text_alone_where_it_is_asked_for(
    vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    manifest = linexport.convert(
        vision_folder("qwen3_5"), tmp_path / "out", vision=False, bench=False, threads=1
    )
    assert manifest.vision is None and "takes text alone" in manifest.warnings[0]
    assert [i.name for i in manifest.inputs][:2] == ["input_ids", "attention_mask"]
    artifact = linexport.load(tmp_path / "out")
    with pytest.raises(UsageError, match="no vision tower"):
        artifact.generate([5], images={})


RECORD = VisionRecord(
    *("", IMAGE, 2, True),
    inputs=(InputRecord("p", "float32", ("n", 6)), InputRecord("g", "int64", (2,))),
    outputs=(TensorRecord("f", "float32", ("n", 3)),),
)
PIXELS = np.zeros((24, 6), np.float32)


@pytest.mark.parametrize(
    ("ids", "pixels", "grid", "message"),
    [
        ([60] * 5, PIXELS, (4, 6), "5 tokens of the id 60; 1 images of .6. tokens need 6"),
        ([60] * 6, PIXELS, (6, 6), r"grid \[6, 6\] has pixel values .*expected \(36, 6\)"),
        ([60] * 6, PIXELS[:, :5], (4, 6), r"pixel values \(24, 5\); expected \(24, 6\)"),
        ([60] * 8, PIXELS, (3, 8), "multiples of 2"),
        ([60, 60, 60, 1, 60, 60, 60], PIXELS, (4, 6), "not one after another"),
    ],
)
def test_images_that_are_not_those_of_the_prompt_are_refused(
    ids: list[int], pixels: np.ndarray, grid: tuple[int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        image_inputs(
            RECORD, lambda fed: {"f": np.ones((6, 3))}, np.array([ids]), [(pixels, np.array(grid))]
        )


@pytest.mark.parametrize(
    ("processed", "message"),
    [
        ({"pixel_values": PIXELS}, "with image_grid_thw, or with spatial_shapes"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[2, 2, 6]]}, "one frame"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[1, 6, 6]]}, "the grids have 36 patches"),
        ({"pixel_values": PIXELS, "image_grid_thw": [[1, 0, 6]]}, "1 or more"),
        ({"pixel_values_videos": PIXELS}, "takes images"),
        (
            {"pixel_values": PIXELS, "spatial_shapes": [[4, 6]], "pixel_attention_mask": [[1]]},
            r"expected \(images, patches, channels\)",
        ),
    ],
)
def test_what_no_image_processor_gives_is_refused(processed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        images_of(processed)


def test_positions_of_words_and_images() -> None:
    """Words before, two images of 2 x 3 and 1 x 1 tokens, words between: as by hand."""
    from linexport.sources.hugging_face.vision.positions import advances, grid_positions

    ids = np.array([[1, 2, *[60] * 6, 3, 60, 4]])
    images = [(PIXELS, np.array([4, 6])), (PIXELS[:4], np.array([2, 2]))]
    features = iter((np.ones((6, 3)), np.ones((1, 3))))
    given = image_inputs(RECORD, lambda fed: {"f": next(features)}, ids, images)
    offsets = torch.from_numpy(given["position_offsets"])
    steps = advances(torch.ones(1, 11).long(), offsets)
    found = grid_positions(steps, offsets, torch.zeros(1, 1).long())[:, 0].tolist()
    assert found == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]


def test_weights_of_multi_token_prediction_are_named_as_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(TINY["qwen3_5_text"], "qwen3_5_text", tmp_path)
    assert not load_model(tmp_path).warnings
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "mtp.fc.weight": torch.ones(2, 2)}, path, {"format": "pt"})
    [warning] = load_model(tmp_path).warnings
    assert "multi-token prediction, 1 weights (mtp.fc.weight" in warning


@pytest.mark.services
@pytest.mark.parametrize(
    ("kind", "place", "wrong", "output"),
    [
        ("qwen3_5", "patches.text_positions.mark", lambda model: None, "logits"),
        pytest.param(
            "lfm2_vl",
            "sources.hugging_face.vision.lfm2_vl.places",
            lambda count, width, merge=1: (torch.arange(count) // width, torch.zeros(count).long()),
            "image_features",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_tower_or_wrong_positions_fail(
    vision_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    place: str,
    wrong: Any,
    output: str,
) -> None:
    """Cases of text pass: what fails is seen on images alone."""
    monkeypatch.setattr(f"linexport.{place}", wrong)
    manifest = linexport.convert(vision_folder(kind), tmp_path / "out", bench=False, threads=1)
    assert manifest.status == "parity_failed"
    failed = [case for case in manifest.parity.cases if not case.passed]
    assert output in {case.output for case in failed}
    assert all("image" in case.name for case in failed)
