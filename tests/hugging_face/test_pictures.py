"""``linexport generate --image``: files of images in a prompt, beside transformers."""

from __future__ import annotations

import copy
import io
import itertools
import json
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import linexport
from linexport.artifact.text import image_processor, picture_process
from linexport.artifact.text.picture import (
    FORMATS,
    MOST_PIXELS,
    MOST_SCANS,
    TILE_SIZE,
    read_picture,
)
from linexport.artifact.text.tokenizer import Files
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest.records import InputRecord, TensorRecord, VisionRecord
from tests.support.command_line import Result
from tests.support.families import save_model
from tests.support.towers import IMAGE, QWEN_VISION, WITH_PICTURES

image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.usefixtures("one_thread")

START, END = IMAGE + 2, IMAGE + 3
SPECIAL = {
    **{IMAGE: "<|image_pad|>", IMAGE + 1: "<|video_pad|>"},
    **{START: "<|vision_start|>", END: "<|vision_end|>"},
}
PROCESSOR = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2},
    **{"temporal_patch_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}},
}
TEMPLATE = """{% for m in messages %}w9 {% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' %} <|vision_start|> <|image_pad|> <|vision_end|>
{%- else %} {{ part.text }}{% endif %}
{%- endfor %}
{%- endif %}{% endfor %} w8"""


def add_language(folder: Path, special: dict[int, str] = SPECIAL) -> None:
    """Write a tokenizer of words w0 to w59, a chat template and an image processor's file."""
    words = {f"w{i}": i for i in range(IMAGE) if i not in special}
    words |= {name: i for i, name in special.items()}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(
        [tokenizers.AddedToken(name, special=True) for name in words if name[0] == "<"]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two images, one of them with transparency."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    made = []
    for name, size in (("a.png", (37, 61, 3)), ("b.png", (50, 22, 4))):
        made.append(folder / name)
        image.fromarray(random.integers(0, 255, size, dtype=np.uint8)).save(made[-1])
    return made


@pytest.mark.services
def test_the_command_writes_what_transformers_writes(
    cli: Callable[..., Result], files: list[Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save_model(WITH_PICTURES["qwen3_5"], "qwen3_5", source, "AutoModelForImageTextToText")
    model = transformers.AutoModelForImageTextToText.from_pretrained(source)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "visual" in name:
                weight *= 5
    model.save_pretrained(source)
    add_language(source)
    linexport.convert(source, tmp_path / "out", bench=False, threads=1)

    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    options = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
    processed = processing.Qwen2VLImageProcessorPil(**options)(
        images=[image.open(file).convert("RGB") for file in files], return_tensors="pt"
    )
    first, second = (int(grid.prod()) // 4 for grid in processed["image_grid_thw"])
    seen = [[START, *[IMAGE] * n, END] for n in (first, second)]

    def wanted(ids: list[int], grids: int, scale: int = 1) -> list[int]:
        rows = int(processed["image_grid_thw"][:grids].prod(1).sum())
        tokens = torch.tensor([ids])
        written = model.generate(
            **{"input_ids": tokens, "attention_mask": torch.ones_like(tokens)},
            **{"pixel_values": scale * processed["pixel_values"][:rows]},
            **{"image_grid_thw": processed["image_grid_thw"][:grids]},
            **{"mm_token_type_ids": (tokens == IMAGE).int(), "max_new_tokens": 9},
            do_sample=False,
        )[0, len(ids) :]
        return [token for token in written.tolist() if token != 2]

    given = ("generate", tmp_path / "out", "--max-tokens", 9, "--threads", 1, "--json")
    pair = ("--image", files[0], "--image", files[1])
    found = cli(*given, *pair, "--chat", "--prompt", "w5 w6")
    assert found.code == 0, found.err
    record = json.loads(found.out)
    ids = [9, *seen[0], *seen[1], 5, 6, 8]
    assert record["prompt_tokens"] == len(ids) and record["tokens"] == wanted(ids, 2)
    assert wanted(ids, 2, scale=-1) != record["tokens"]  # the images matter
    placed = "w5 <|vision_start|> <|image_pad|> <|vision_end|> w7"
    found = cli(*given, "--image", files[0], "--prompt", placed)
    assert json.loads(found.out)["tokens"] == wanted([5, *seen[0], 7], 1)

    for options, message in (
        ((*pair, "--prompt", "w5"), "has 0 image tokens for 2 images. Write <|image_pad|> where"),
        ((*pair, "--prompt", "w5", "--prompt", "w6"), "--image takes one prompt and no --draft"),
        (("--image", source / "config.json", "--prompt", placed), "cannot be read as an image"),
        (("--image", tmp_path / "none.png", "--prompt", placed), "No such file"),
    ):
        found = cli(*given[:-1], *options)
        assert found.code == 2 and message in " ".join(found.err.split()), found.err


TILES = {
    **{IMAGE: "<image>", 40: "<|image_start|>", 41: "<|image_end|>", 42: "<|img_thumbnail|>"},
    **{
        43 + i: f"<|img_row_{row}_col_{column}|>"
        for i, (row, column) in enumerate(itertools.product((1, 2, 3, 4), (1, 2, 3, 4)))
        if row * column <= 4
    },
}
TILE_PROCESSOR = {
    **{"image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 4, "tile_size": 32},
    **{"min_tiles": 2, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16},
}


def add_tiles(folder: Path) -> None:
    """Write the files of a model whose processor cuts pictures into tiles."""
    add_language(folder, TILES)
    (folder / "chat_template.jinja").write_text(
        TEMPLATE.replace("<|vision_start|> <|image_pad|> <|vision_end|>", "<image>")
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(TILE_PROCESSOR))
    (folder / "processor_config.json").write_text('{"processor_class": "Lfm2VlProcessor"}')
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w3"}'
    )


def torchvision_works() -> bool:
    """Whether it is there, and of this build of torch."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


@pytest.mark.services
@pytest.mark.skipif(not torchvision_works(), reason="needs torchvision")
def test_tiles_are_those_of_transformers(cli: Callable[..., Result], tmp_path: Path) -> None:
    """Pictures of one tile and of several, of several shapes, alone and together."""
    source = tmp_path / "source"
    save_model(WITH_PICTURES["lfm2_vl"], "lfm2_vl", source, "AutoModelForImageTextToText")
    model = transformers.AutoModelForImageTextToText.from_pretrained(source)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "language_model" not in name and "lm_head" not in name:
                weight *= 5
    model.save_pretrained(source)
    add_tiles(source)
    linexport.convert(source, tmp_path / "out", bench=False, threads=1)
    processor = transformers.AutoProcessor.from_pretrained(source)
    random, sizes, files = np.random.default_rng(0), [(20, 30), (64, 100), (150, 40), (37, 33)], []
    for size in sizes:
        files.append(tmp_path / f"{size[0]}x{size[1]}.png")
        image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)).save(files[-1])

    artifact, counts = linexport.load(tmp_path / "out", threads=1), []
    for chosen in ([files[0]], [files[1]], [files[2]], files):
        given = processor(
            **{"images": [image.open(file) for file in chosen], "return_tensors": "pt"},
            **{"text": "w9 " + "<image> " * len(chosen) + "w5 w6 w8"},
        )
        ids, images = image_processor.with_pictures(
            artifact, [9, *[IMAGE] * len(chosen), 5, 6, 8], chosen
        )
        assert ids == given["input_ids"][0].tolist()
        tokens = np.array(ids)
        got = artifact.run(tokens[None], **artifact.image_inputs(tokens, images))["logits"]
        with torch.no_grad():
            rounded = model(**given).logits.numpy()
            given["pixel_values"] = given["pixel_values"].double()
            exact = copy.deepcopy(model).double()(**given).logits.numpy()
            given["pixel_values"] = -given["pixel_values"].float()
            other = model(**given).logits.numpy()
        assert np.abs(got - exact).max() < 2 * np.abs(rounded - exact).max() < 2e-4
        assert np.abs(other - exact)[:, -1].max() > 3e-3  # the images matter
        counts.append(len(ids))
    assert counts[0] < 20 < counts[1] != counts[2] and counts[3] > sum(counts[:3]) - 15

    given["pixel_values"] = -given["pixel_values"]
    written = model.generate(**given, max_new_tokens=9, do_sample=False)[0, len(ids) :]
    found = cli(
        *("generate", tmp_path / "out", "--max-tokens", 9, "--threads", 1, "--json", "--chat"),
        *(x for file in files for x in ("--image", file)),
        *("--prompt", "w5 w6"),
    )
    assert found.code == 0, found.err
    record = json.loads(found.out)
    assert record["prompt_tokens"] == len(ids)
    assert record["tokens"] == [token for token in written.tolist() if token != 2]


def test_tokens_of_tiles_stand_where_the_picture_is(
    opened: Opened, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the processor's arithmetic left aside: it needs torchvision."""
    add_tiles(opened.path)
    (opened.path / "config.json").write_text('{"model_type": "lfm2_vl"}')
    seen = []

    def processor(images: list[Any], text: str, **options: Any) -> dict[str, np.ndarray]:
        assert text == "<image>" and len(images) == 1
        assert options == {"add_special_tokens": False, "return_tensors": "np"}
        seen.append(images[0].size)
        tiles = len(seen)
        return {
            "input_ids": np.array([[40, *[43, IMAGE] * tiles, 41]]),
            "attention_mask": np.ones((1, 2 + 2 * tiles)),
            "pixel_values": np.full((tiles, 4, 48), tiles),
            "spatial_shapes": np.full((tiles, 2), 2),
            "pixel_attention_mask": np.ones((tiles, 4), np.int64),
        }

    processor.image_token = "<image>"  # type: ignore[attr-defined]

    def from_pretrained(folder: Path, **options: Any) -> Any:
        assert options == {"local_files_only": True, "trust_remote_code": False}
        assert (folder / "tokenizer.json").is_file() and (
            folder / "processor_config.json"
        ).is_file()
        return processor

    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace())
    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", from_pretrained)
    ids, images = image_processor.with_pictures(opened, [5, IMAGE, 6, IMAGE], files)
    assert seen == [image.open(file).size for file in files]
    assert ids == [5, 40, 43, IMAGE, 41, 6, 40, 43, IMAGE, 43, IMAGE, 41]
    assert sorted(images) == ["pixel_attention_mask", "pixel_values", "spatial_shapes"]
    assert images["pixel_values"][:, 0, 0].tolist() == [1, 2, 2]


def test_torchvision_is_named_where_tiles_need_it(
    opened: Opened, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (opened.path / "config.json").write_text('{"model_type": "lfm2_vl"}')
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(
        EnvironmentProblemError, match=r"not installed: pip install torchvision, in"
    ):
        image_processor.with_pictures(opened, [IMAGE], files[:1])


class Opened(SimpleNamespace):
    """Attributes that are read of an artifact, whose files were not verified."""

    path: Path
    manifest: Any
    verified: Files


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """A vision model's folder, of which nothing is run."""
    add_language(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    vision = VisionRecord(
        *("vision.onnx", IMAGE, 2, True),
        inputs=(InputRecord("p", "float32", ("n", 96)), InputRecord("g", "int64", (2,))),
        outputs=(TensorRecord("f", "float32", ("n", 32)),),
    )
    return Opened(path=tmp_path, manifest=SimpleNamespace(vision=vision), verified={})


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_every_image_has_its_tokens(opened: Opened, files: list[Path], name: str) -> None:
    """Both files that checkpoints have of their image processor."""
    (opened.path / "preprocessor_config.json").unlink()
    inside = {"image_processor": PROCESSOR, "processor_class": "Qwen3VLProcessor"}
    (opened.path / name).write_text(json.dumps(PROCESSOR if name[:3] == "pre" else inside))
    assert QWEN_VISION["patch_size"] == PROCESSOR["patch_size"]
    ids, images = image_processor.with_pictures(opened, [5, IMAGE, 6, IMAGE], files)
    first, second = images["image_grid_thw"].prod(1) // 4
    assert first > second > 1 and len(images["pixel_values"]) == 4 * (first + second)
    assert ids == [5, *[IMAGE] * first, 6, *[IMAGE] * second]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda given: setattr(given.manifest, "vision", None), "has no vision tower"),
        (
            lambda given: (given.path / "config.json").write_text('{"model_type": "own"}'),
            r"is a model of own; images are prepared for qwen3_5, qwen3_5_moe, lfm2_vl\. Call",
        ),
        (
            lambda given: (given.path / "preprocessor_config.json").unlink(),
            "has no image processor: expected preprocessor_config.json or processor_config.json",
        ),
        (
            lambda given: (given.path / "preprocessor_config.json").write_text("{"),
            "preprocessor_config.json. refuses the images, or is damaged",
        ),
        (
            lambda given: (given.path / "preprocessor_config.json").write_text(
                json.dumps({**PROCESSOR, "patch_size": "x"})
            ),
            "preprocessor_config.json. refuses the images, or is damaged",
        ),
    ],
)
def test_what_cannot_take_images_is_refused(
    spoil: Callable[[Opened], object], message: str, opened: Opened, files: list[Path]
) -> None:
    spoil(opened)
    with pytest.raises(UsageError, match=message):
        image_processor.with_pictures(opened, [IMAGE], files[:1])


def test_code_of_a_folder_is_not_run(opened: Opened, files: list[Path]) -> None:
    (opened.path / "own.py").write_text("raise SystemExit(9)")
    own = {"auto_map": {"AutoImageProcessor": "own.Processor"}, "image_processor_type": "Processor"}
    (opened.path / "preprocessor_config.json").write_text(json.dumps(own))
    with pytest.raises(UsageError, match="refuses the images, or is damaged"):
        image_processor.with_pictures(opened, [IMAGE], files[:1])


def test_a_missing_library_is_named_with_its_extra(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(EnvironmentProblemError, match=r"pip install '\.\[images\]'"):
        read_picture(files[0])


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    made, settings = image.new("RGB", (3, 2)), image.Exif()
    settings[0x0112] = 6
    made.save(tmp_path / "turned.jpg", exif=settings)
    assert read_picture(tmp_path / "turned.jpg").size == (2, 3)


@pytest.mark.parametrize("form", FORMATS)
def test_pictures_of_usual_formats_are_read_whatever_they_are_called(
    form: str, tmp_path: Path
) -> None:
    path = tmp_path / "picture.dat"
    image.new("RGB", (3, 2), (255, 0, 0)).save(path, form)
    assert read_picture(path).size == (3, 2)


@pytest.mark.parametrize("name", ["a.jpg", "a.eps", "a.png"])
def test_a_picture_that_is_a_program_is_not_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostScript goes to an interpreter, as Pillow does it, whatever the file is called."""
    path, started = tmp_path / name, []
    image.new("RGB", (3, 2)).save(path, "EPS")
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: started.append(a))
    with pytest.raises(UsageError, match="cannot be read as an image"):
        read_picture(path)
    assert not started


def test_a_picture_of_too_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a hundred kilobytes may have any number of them."""
    path = tmp_path / "large.png"
    image.new("1", (9000, 9000)).save(path)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    with pytest.raises(UsageError, match=r"9000 x 9000 pixels; at most 33,554,432 are decoded"):
        read_picture(path)


def tiff(*tags: tuple[int, int], data: bytes = b"", order: str = "<") -> bytes:
    """A TIFF file of these tags, all of one number; offsets of data are 300."""
    mark = {"<": b"II", ">": b"MM"}[order]
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags)
    head = mark + struct.pack(f"{order}HIH", 42, 8, len(tags)) + entries + bytes(4)
    return head.ljust(300, b"\0") + data


def tiled(*sizes: int, compression: int = 8, **of_file: Any) -> bytes:
    """A grey picture of 16 x 16 pixels in tiles of these sizes: once, or twice."""
    plain = {256: 16, 257: 16, 258: 8, 259: compression, 262: 1, 277: 1}
    data = bytes(256) if compression == 1 else zlib.compress(bytes(2**20))
    tiles = [(tag, size) for size in sizes for tag in TILE_SIZE]
    return tiff(*plain.items(), *tiles, (324, 300), (325, len(data)), data=data, **of_file)


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiles_of_a_picture_are_pixels_as_well(order: str, tmp_path: Path) -> None:
    """A picture of 256 pixels takes the memory of its one tile, which is decoded whole."""
    path = tmp_path / "tiled.tif"
    path.write_bytes(tiled(40_000, order=order))
    with pytest.raises(UsageError, match="40000 x 40000 pixels"):
        read_picture(path)
    for sizes in [(40_000, 16), (16, 40_000)]:
        path.write_bytes(tiled(*sizes, order=order))
        with pytest.raises(UsageError, match="the size of its tiles is not clear"):
            read_picture(path)
    path.write_bytes(tiled(16, compression=1, order=order))
    assert read_picture(path).size == (16, 16)


@pytest.mark.parametrize("given", [b"no\n", b""])
def test_nothing_is_decoded_before_its_memory_is_counted(
    given: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO()
    image.new("1", (5000, 3000)).save(content, "PNG")
    wire = picture_process.Wire(io.BytesIO(given), answers := io.BytesIO())
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    monkeypatch.setattr(picture_process, "allow", lambda seconds: None)
    processor: Any = None
    with pytest.raises(picture_process.DroppedError):
        picture_process.answer(wire, processor, [content.getvalue()] * 2, 30_000_000)
    assert json.loads(answers.getvalue()) == {"pixels": 30_000_000}
    with pytest.raises(UsageError, match="have 30,000,000 pixels together; this server reads at"):
        picture_process.answer(wire, processor, [content.getvalue()] * 2, 29_999_999)
    tiles = [tiled(4_000), tiled(4_000)]  # 16 x 16 pixels, decoded as tiles of sixteen million
    with pytest.raises(UsageError, match="have 32,000,000 pixels together"):
        picture_process.answer(wire, processor, tiles, 29_999_999)
    assert json.loads(answers.getvalue()) == {"pixels": 30_000_000}


OTHERS = {
    **dict.fromkeys(("DDS", "ICO", "PCX", "PDF", "PPM", "SGI", "TGA", "JPEG2000"), b""),
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "QOI": b"qoif" + struct.pack(">IIBB", 1, 1, 4, 0) + b"\xff\1\2\3\4" + bytes(7) + b"\1",
}


@pytest.mark.parametrize("form", ["JPEG", "MPO"])
def test_a_jpeg_file_of_many_scans_is_not_decoded(form: str, tmp_path: Path) -> None:
    """Each scan goes over all pixels: one of few bytes costs as much as the whole picture."""
    content, path = io.BytesIO(), tmp_path / "a.jpg"
    picture = image.new("RGB", (64, 64), (9, 8, 7))
    several = {"save_all": True, "append_images": [picture]} if form == "MPO" else {}
    picture.save(content, form, progressive=True, **several)
    found = content.getvalue()
    end, own = found.index(b"\xff\xd9"), found.count(b"\xff\xda")
    last = found[found.rindex(b"\xff\xda", 0, end) : end]
    path.write_bytes(found[:end] + last * (MOST_SCANS - own) + found[end:])
    assert read_picture(path).size == (64, 64)
    path.write_bytes(found[:end] + last * (MOST_SCANS - own + 1) + found[end:])
    with pytest.raises(UsageError, match="has 101 scans; at most 100"):
        read_picture(path)


@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_pictures_of_other_formats_are_not_tried(
    form: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"picture.{ending}"
    path.write_bytes(OTHERS[form])
    if not OTHERS[form]:
        image.new("RGB", (16, 16)).save(path, form)
    image.init()
    tried = []
    for name, (_, accept) in image.OPEN.items():
        if name not in FORMATS:
            known = (lambda *_, name=name: tried.append(name), accept)
            monkeypatch.setitem(image.OPEN, name, known)
    with pytest.raises(UsageError, match="cannot be read as an image"):
        read_picture(path)
    assert not tried


MEASURE = """
import resource, sys
from pathlib import Path
from PIL import ImageOps, WebPImagePlugin
from linexport.artifact.text.picture import read_picture
most = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = most()
read_picture(Path(sys.argv[1]))
print((most() - before) // 1024)
"""


def test_the_largest_picture_takes_some_hundred_mebibytes(tmp_path: Path) -> None:
    """A WEBP file of 120 kB took 1,283 MiB, within the limit of pixels."""
    size = (8192, MOST_PIXELS // 8192)
    image.new("RGB", size).save(tmp_path / "large.webp")
    command = [sys.executable, "-W", "error", "-c", MEASURE, str(tmp_path / "large.webp")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) < 640


def test_a_picture_that_is_refused_has_no_warning_of_its_library(tmp_path: Path) -> None:
    image.new("L", (10_000, 9_000)).save(tmp_path / "large.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UsageError, match="10000 x 9000 pixels"):
            read_picture(tmp_path / "large.png")
