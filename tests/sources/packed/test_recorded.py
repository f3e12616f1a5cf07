"""Weights that the libraries themselves wrote, with the numbers that they read back.

Each file has the tensors of one layer, ``layer.*``, the settings of a configuration, and what the
library's own code makes of them in float32: AutoGPTQ 0.7.1 (``QuantLinear.pack``; its formula in
float32), AutoAWQ 0.2.9 (``WQLinear_GEMM.from_linear``), compressed-tensors 0.20.1 (``compress`` and
``decompress``; of floats of four bits and of exponents ``dequantize``, in float32), bitsandbytes
0.50.2 on the CPU and mlx 0.32.4 (``quantize`` and ``dequantize``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from linexport.sources.packed import read_weights

FILES = sorted((Path(__file__).parent / "recorded").glob("*.safetensors"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_weight_is_read_to_the_bit_as_the_library_reads_it(path: Path) -> None:
    with safe_open(path, "pt") as file:
        settings = json.loads(file.metadata()["settings"])
        expected = file.get_tensor("expected")
    weights = read_weights(path.parent, [path], {"quantization_config": settings})
    assert weights.tensors.keys() == {"layer.weight", "expected"}
    found = weights.tensors["layer.weight"]
    assert found.shape == expected.shape
    assert torch.equal(found.read(), expected)


def test_files_of_every_format_are_recorded() -> None:
    assert {path.stem.partition("-")[0] for path in FILES} == {"awq", "bnb", "ct", "gptq", "mlx"}
