"""GPUs by name: the table, how names are read, and what an unknown one is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from linexport.errors import UsageError
from linexport.plugins.kernels.architectures import ARCHITECTURES, runs_on
from linexport.system.gpus import GPUS, SOURCES, find_gpu


def test_every_name_is_one_gpu() -> None:
    names = [name for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    plain = Counter(name.replace("-", "") for name in names)
    assert max(plain.values()) == 1
    assert all(name == name.lower() and " " not in name for name in names)
    assert all(find_gpu(name) is gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases))


def test_every_figure_has_a_source_and_every_gpu_but_the_t4_has_kernels() -> None:
    assert {gpu.source for gpu in GPUS} == set(SOURCES)
    assert all(gpu.memory > 0 and gpu.bandwidth > 0 for gpu in GPUS)
    without = {g.name for g in GPUS if not any(runs_on(sm, g.sm) for sm in ARCHITECTURES)}
    assert without == {"t4"}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("RTX 5090 Laptop GPU", "rtx5090-laptop"),
        ("Jetson Orin Nano", "orin-nano"),
        ("a100", "a100-40gb"),  # the smaller memory
        ("agx_orin", "agx-orin-32gb"),
        ("rtx4060ti", "rtx4060-ti-8gb"),
        ("spark", "dgx-spark"),
    ],
)
def test_names_are_read_as_people_write_them(given: str, name: str) -> None:
    assert find_gpu(given).name == name


@pytest.mark.parametrize(
    ("given", "near"), [("rtx4091", "rtx4090"), ("orin nan", "orin-nano"), ("l4x", "l4")]
)
def test_an_unknown_name_is_answered_with_the_nearest(given: str, near: str) -> None:
    with pytest.raises(UsageError, match=rf"Nearest names: .*\b{near}\b") as found:
        find_gpu(given)
    assert str(found.value).count(",") <= 4
    with pytest.raises(UsageError, match=r"known as .§§.\. docs"):
        find_gpu("§§")


def test_an_option_says_which_names_are_near(cli: Callable[..., Any]) -> None:
    done = cli("convert", "x.pt", "--target", "ort-cuda", "--sm", "rtx4091")
    assert done.code == 2 and "rtx4090" in done.err
