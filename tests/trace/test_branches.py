"""Branches on a length that the example decides."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from linexport.errors import UnsupportedModelError
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.system.torch_internals.trees import pytree
from linexport.trace import trace
from linexport.trace.program import export_program

CHUNK = 8


class Padded(nn.Module):
    """Sums of whole chunks, of padding cut off where there is any, as fla's Mamba2 has them."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""
        length = x.shape[1]
        padding = (CHUNK - length % CHUNK) % CHUNK
        x = F.pad(x, (0, 0, 0, padding))
        chunks = x.reshape(x.shape[0], -1, CHUNK, x.shape[2])
        y = (chunks + chunks.sum(2, keepdim=True)).flatten(1, 2)
        if padding > 0:
            y = y[:, :length]
        return y


class Different(Padded):
    """What is computed of whole chunks is not what is computed of others."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""
        if x.shape[1] % CHUNK != 0:
            return super().forward(x) * 2
        return super().forward(x)


class Merged(nn.Module):
    """Four pixels to one, as Swin's PatchMerging has them, and UNet's skip, padded to its size."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.ConvTranspose2d(12, 3, 2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H, W, C)."""
        _, height, width, _ = x.shape
        y = x
        if height % 2 == 1 or width % 2 == 1:
            y = F.pad(y, (0, 0, 0, width % 2, 0, height % 2))
        y = self.norm(torch.cat([y[:, i::2, j::2] for i in (0, 1) for j in (0, 1)], -1))
        skip, y = x.permute(0, 3, 1, 2), self.up(y.permute(0, 3, 1, 2))
        if y.shape[2:] != skip.shape[2:]:
            y = F.interpolate(y, size=skip.shape[2:], mode="nearest")
        rows = skip.shape[2] - 2 * y.shape[2]
        return y + skip, F.pad(skip, [0, 0, rows // 2, rows - rows // 2])


class Windows(nn.Module):
    """Windows of whole size, each axis padded by itself."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W)."""
        batch, channels, height, width = x.shape
        bottom, right = (3 - height % 3) % 3, (CHUNK - width % CHUNK) % CHUNK
        if bottom > 0:
            x = F.pad(x, (0, 0, 0, bottom))
        if right > 0:
            x = F.pad(x, (0, right))
        rows, columns = x.shape[2] // 3, -(-width // CHUNK)
        windows = x.view(batch, channels, rows, 3, columns, CHUNK)
        y = (windows - windows.mean((3, 5), keepdim=True)).view(x.shape)
        return y[:, :, :height, :width]


class Interpolated(nn.Module):
    """A table of the size that the model was trained with, stretched to others."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(1, 3, 16))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""
        table = self.get_buffer("table")
        if x.shape[1] != table.shape[2]:
            table = F.interpolate(table, size=x.shape[1], mode="linear")
        return x + table.mT


def loaded(module: nn.Module, length: int) -> LoadedModel:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    return model(module, torch.randn(2, length, 3), shapes)


def model(module: nn.Module, example: Tensor, shapes: object) -> LoadedModel:
    source = Source("factory", "x", None, "", None)
    return LoadedModel(module.eval(), (example,), {}, shapes, source)


def session(graph: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(graph.SerializeToString())


def equal_at(module: nn.Module, traced: LoadedModel, shapes: list[tuple[int, ...]]) -> None:
    """Compare a translated trace with its module."""
    run = session(trace(traced).model)
    for shape in shapes:
        x = torch.randn(shape)
        expected = pytree.tree_leaves(module(x))
        for got, value in zip(run.run(None, {"x": x.numpy()}), expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(got), value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [4 * CHUNK, 4 * CHUNK - 1, 4 * CHUNK - 3])
def test_a_branch_that_is_right_for_every_length_is_traced(length: int) -> None:
    program = export_program(loaded(Padded(), length)).module(check_guards=False)
    for other in (1, 2, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK - 1, 9 * CHUNK):
        x = torch.randn(3, other, 3)
        torch.testing.assert_close(program(x), Padded()(x))


@pytest.mark.parametrize("sizes", [(8, 8), (8, 6), (7, 9), (8, 9)])
def test_padding_to_whole_pixels_is_right_for_images_of_every_size(sizes: tuple[int, int]) -> None:
    module, (height, width) = Merged().eval(), sizes
    shapes = ({0: Dim("batch"), 1: Dim("height"), 2: Dim("width")},)
    traced = model(module, torch.randn(2, height, width, 3), shapes)
    equal_at(module, traced, [(1, 8, 10, 3), (3, 7, 7, 3), (2, 5, 12, 3), (1, 10, 3, 3)])


def test_padding_to_whole_windows_is_right_for_images_of_every_size() -> None:
    shapes = ({0: Dim("batch"), 2: Dim("height"), 3: Dim("width")},)
    traced = model(Windows(), torch.randn(2, 3, 12, 2 * CHUNK), shapes)
    sizes = [(12, 2 * CHUNK), (7, CHUNK), (9, CHUNK + 3), (2, 3 * CHUNK - 1)]
    equal_at(Windows(), traced, [(3, 3, *size) for size in sizes])


@pytest.mark.parametrize("seq", [Dim("seq"), Dim.DYNAMIC], ids=["named", "unnamed"])
def test_a_table_of_the_size_of_the_example_is_stretched_to_others(seq: object) -> None:
    module = Interpolated()
    traced = model(module, torch.randn(2, 16, 3), ({0: Dim.DYNAMIC, 1: seq},))
    equal_at(module, traced, [(2, 16, 3), (1, 9, 3), (3, 40, 3)])


def test_a_branch_that_computes_otherwise_is_refused_with_its_line_and_what_converts() -> None:
    shapes = ({0: Dim("batch"), 1: Dim("time")},)
    with pytest.raises(UnsupportedModelError) as error:
        export_program(model(Different(), torch.randn(2, 4 * CHUNK, 3), shapes))
    said = str(error.value)
    assert f"{__file__}:" in said and "`if x.shape[1] % CHUNK != 0:`" in said
    assert "at time 32" in said and "at time 31" in said
    assert f"time={CHUNK}*4 in " in said and f"{CHUNK} * torch.export.Dim" in said


def test_the_multiples_that_the_error_names_convert() -> None:
    shapes = ({0: Dim("batch"), 1: CHUNK * Dim("time")},)
    traced = model(Different(), torch.randn(2, 4 * CHUNK, 3), shapes)
    equal_at(Different(), traced, [(1, CHUNK, 3), (3, 7 * CHUNK, 3)])


def test_a_model_that_fails_at_other_sizes_itself_is_told_so() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.unflatten(1, (4, 4)).flip(1).flatten(1, 2)

    with pytest.raises(UnsupportedModelError) as error:
        export_program(loaded(Fixed(), 16))
    said = str(error.value)
    assert "fails at others, on x (2, 17, 3) float32" in said and "unflatten" in said
    assert "leave the dimension out" in said and "loop over tokens" not in said


def test_masks_of_every_second_token_go_with_a_convolution_over_them() -> None:
    """sympy cannot solve that the two lengths are one, as a Conformer's are."""

    class Subsampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Sequential(nn.Conv1d(3, 3, 3, 2), nn.Conv1d(3, 3, 3, 2))

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            mask = torch.arange(x.shape[1]) < lengths[:, None]
            return self.conv(x.mT).masked_fill(~mask[:, None, 2::2][:, :, 2::2], 0.0).mT

    module = Subsampled().eval()
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    given = (torch.randn(2, 40, 3), torch.tensor([40, 25]))
    program = export_program(replace(loaded(module, 40), args=given, dynamic_shapes=shapes))
    for length in (40, 39, 38, 37, 101):
        x, lengths = torch.randn(3, length, 3), torch.tensor([length, length // 2, 7])
        found = program.module(check_guards=False)(x, lengths)
        torch.testing.assert_close(found, module(x, lengths))
