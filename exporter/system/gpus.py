"""NVIDIA's GPUs by name: compute capability, size and bandwidth of the memory.

Sizes are in GB, bandwidth in GB/s (10^9 bytes); ``SOURCES`` says what each was compared with. A
name without a size is the smallest memory sold under it. ``orin-nano`` is the developer kit's; both
Orin Nanos are in a Super power mode, without which bandwidth is two thirds. Compute capabilities
are NVIDIA's (developer.nvidia.com/cuda-gpus), or those of the architecture where that table leaves
out a GPU.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from linexport.errors import UsageError

SOURCES = {
    "database": "TechPowerUp's GPU database of December 2025, which agrees within 1 %",
    "laptop": "the same database; a laptop's maker may build in slower memory",
    "data sheet": "NVIDIA's data sheet of the product, read in a transcript",
    "report": "a table of others: Tom's Hardware for H20 and L2, Verda for B300 and GB300",
    "quoted": "NVIDIA's figure as others quote it; the database differs by 2 to 14 %",
    "interface": "width of the memory interface times its data rate; no page confirms it",
}
"""Sources of bandwidths."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that is sold under a name of its own.

    Attributes:
        name: as options take it, in lower case; letters, digits and dashes.
        title: as NVIDIA writes it.
        sm: compute capability times ten.
        memory: GB.
        bandwidth: of the memory, GB/s.
        source: of the bandwidth, a key of ``SOURCES``.
        aliases: other names.
        unified: the memory is the whole computer's, shared with the CPU.
    """

    name: str
    title: str
    sm: int
    memory: float
    bandwidth: float
    source: str = "database"
    aliases: tuple[str, ...] = ()
    unified: bool = False


def _geforce(
    sm: int, rows: dict[str, tuple[float, float]], source: str = "database"
) -> tuple[Gpu, ...]:
    """Return GeForce GPUs from their memory and bandwidth by name."""
    return tuple(
        Gpu(name, f"GeForce {_title(name)}", sm, memory, bandwidth, source, _without_size(name))
        for name, (memory, bandwidth) in rows.items()
    )


def _title(name: str) -> str:
    """Return "RTX 4070 Ti Super 16 GB" for "rtx4070-ti-super-16gb"."""
    words = {"ti": "Ti", "super": "Super", "laptop": "Laptop", "d": "D"}
    parts = (words.get(part, part) for part in name.removeprefix("rtx").split("-"))
    return "RTX " + " ".join(f"{p[:-2]} GB" if p.endswith("gb") else p for p in parts)


SMALLEST = ("rtx3050-6gb", "rtx3060-8gb", "rtx3080-10gb", "rtx4060-ti-8gb", "rtx5060-ti-8gb")
"""GeForce GPUs that are sold with more memory under the same name."""


def _without_size(name: str) -> tuple[str, ...]:
    return (name.rpartition("-")[0],) if name in SMALLEST else ()


GPUS: tuple[Gpu, ...] = (
    *_geforce(
        120,
        {
            "rtx5090": (32, 1792),
            "rtx5080": (16, 960),
            "rtx5070-ti": (16, 896),
            "rtx5070": (12, 672),
            "rtx5060-ti-8gb": (8, 448),
            "rtx5060-ti-16gb": (16, 448),
            "rtx5060": (8, 448),
            "rtx5050": (8, 320),
        },
    ),
    *_geforce(
        120,
        {
            "rtx5090-laptop": (24, 896),
            "rtx5080-laptop": (16, 896),
            "rtx5070-ti-laptop": (12, 672),
            "rtx5070-laptop": (8, 384),
            "rtx5060-laptop": (8, 384),
            "rtx5050-laptop": (8, 384),
        },
        "laptop",
    ),
    *_geforce(
        89,
        {
            "rtx4090": (24, 1008),
            "rtx4090-d": (24, 1008),
            "rtx4080-super": (16, 736),
            "rtx4080": (16, 717),
            "rtx4070-ti-super": (16, 672),
            "rtx4070-ti": (12, 504),
            "rtx4070-super": (12, 504),
            "rtx4070": (12, 504),
            "rtx4060-ti-8gb": (8, 288),
            "rtx4060-ti-16gb": (16, 288),
            "rtx4060": (8, 272),
        },
    ),
    *_geforce(
        89,
        {
            "rtx4090-laptop": (16, 576),
            "rtx4080-laptop": (12, 432),
            "rtx4070-laptop": (8, 256),
            "rtx4060-laptop": (8, 256),
            "rtx4050-laptop": (6, 192),
        },
        "laptop",
    ),
    *_geforce(
        86,
        {
            "rtx3090-ti": (24, 1008),
            "rtx3090": (24, 936),
            "rtx3080-ti": (12, 912),
            "rtx3080-10gb": (10, 760),
            "rtx3080-12gb": (12, 912),
            "rtx3070-ti": (8, 608),
            "rtx3070": (8, 448),
            "rtx3060-ti": (8, 448),
            "rtx3060-8gb": (8, 240),
            "rtx3060-12gb": (12, 360),
            "rtx3050-6gb": (6, 168),
            "rtx3050-8gb": (8, 224),
        },
    ),
    *_geforce(
        86,
        {
            "rtx3080-ti-laptop": (16, 512),
            "rtx3080-laptop": (8, 448),
            "rtx3070-ti-laptop": (8, 448),
            "rtx3070-laptop": (8, 448),
            "rtx3060-laptop": (6, 336),
            "rtx3050-ti-laptop": (4, 192),
            "rtx3050-laptop": (4, 192),
        },
        "laptop",
    ),
    Gpu(
        "rtx-pro-6000",
        "RTX PRO 6000 Blackwell Server Edition",
        120,
        96,
        1597,
        "quoted",
        aliases=("rtx-pro-6000-server",),
    ),
    Gpu(
        "rtx-pro-6000-workstation",
        "RTX PRO 6000 Blackwell Workstation Edition",
        120,
        96,
        1792,
        aliases=("rtx-pro-6000-max-q",),
    ),
    Gpu(
        "rtx-pro-5000-48gb",
        "RTX PRO 5000 Blackwell 48 GB",
        120,
        48,
        1344,
        aliases=("rtx-pro-5000",),
    ),
    Gpu("rtx-pro-5000-72gb", "RTX PRO 5000 Blackwell 72 GB", 120, 72, 1344),
    Gpu("rtx-pro-4500", "RTX PRO 4500 Blackwell", 120, 32, 896),
    Gpu("rtx-pro-4000", "RTX PRO 4000 Blackwell", 120, 24, 672),
    Gpu("rtx-pro-4000-sff", "RTX PRO 4000 Blackwell SFF", 120, 24, 432),
    Gpu("rtx-pro-2000", "RTX PRO 2000 Blackwell", 120, 16, 288),
    Gpu("rtx6000-ada", "RTX 6000 Ada Generation", 89, 48, 960),
    Gpu("rtx5880-ada", "RTX 5880 Ada Generation", 89, 48, 960, "quoted"),
    Gpu("rtx5000-ada", "RTX 5000 Ada Generation", 89, 32, 576),
    Gpu("rtx4500-ada", "RTX 4500 Ada Generation", 89, 24, 432),
    Gpu("rtx4000-ada", "RTX 4000 Ada Generation", 89, 20, 360),
    Gpu("rtx4000-sff-ada", "RTX 4000 SFF Ada Generation", 89, 20, 280),
    Gpu("rtx2000-ada", "RTX 2000 Ada Generation", 89, 16, 224, "quoted"),
    Gpu("rtx-a6000", "RTX A6000", 86, 48, 768),
    Gpu("rtx-a5500", "RTX A5500", 86, 24, 768),
    Gpu("rtx-a5000", "RTX A5000", 86, 24, 768),
    Gpu("rtx-a4500", "RTX A4500", 86, 20, 640),
    Gpu("rtx-a4000", "RTX A4000", 86, 16, 448),
    Gpu("rtx-a2000-6gb", "RTX A2000 6 GB", 86, 6, 288, aliases=("rtx-a2000",)),
    Gpu("rtx-a2000-12gb", "RTX A2000 12 GB", 86, 12, 288),
    Gpu("rtx-a1000", "RTX A1000", 86, 8, 192),
    Gpu("rtx-a400", "RTX A400", 86, 4, 96),
    Gpu("gb300", "GB300", 103, 279, 8000, "report"),
    Gpu("b300", "B300", 103, 270, 7700, "report"),
    Gpu("gb200", "GB200", 100, 186, 8000, "data sheet"),
    Gpu("b200", "B200", 100, 180, 7700, "data sheet"),
    Gpu("gh200-96gb", "GH200 96 GB", 90, 96, 4000, "data sheet", aliases=("gh200",)),
    Gpu("gh200-144gb", "GH200 144 GB", 90, 144, 4900, "data sheet"),
    Gpu("h200", "H200", 90, 141, 4800, "quoted"),
    Gpu("h20", "H20", 90, 96, 4000, "report"),
    Gpu("h100-nvl", "H100 NVL", 90, 94, 3938),
    Gpu("h100-pcie", "H100 PCIe", 90, 80, 2039),
    Gpu("h100-sxm", "H100 SXM", 90, 80, 3350, aliases=("h100",)),
    Gpu("l40s", "L40S", 89, 48, 864),
    Gpu("l40", "L40", 89, 48, 864),
    Gpu("l20", "L20", 89, 48, 864),
    Gpu("l4", "L4", 89, 24, 300),
    Gpu("l2", "L2", 89, 24, 300, "report"),
    Gpu("a100-40gb", "A100 40 GB", 80, 40, 1555, aliases=("a100",)),
    Gpu("a100-80gb-pcie", "A100 80 GB PCIe", 80, 80, 1935, aliases=("a100-pcie",)),
    Gpu("a100-80gb-sxm", "A100 80 GB SXM", 80, 80, 2039, aliases=("a100-sxm", "a100-80gb")),
    Gpu("a30", "A30", 80, 24, 933),
    Gpu("a40", "A40", 86, 48, 696),
    Gpu("a16", "A16, one of its four GPUs", 86, 16, 200),
    Gpu("a10", "A10", 86, 24, 600, aliases=("a10g",)),
    Gpu("a2", "A2", 86, 16, 200),
    Gpu("t4", "T4", 75, 16, 320),
    Gpu("thor-t5000", "Jetson AGX Thor T5000", 110, 128, 273, aliases=("agx-thor",), unified=True),
    Gpu("thor-t4000", "Jetson Thor T4000", 110, 64, 273, aliases=("thor",), unified=True),
    Gpu("agx-orin-64gb", "Jetson AGX Orin 64 GB", 87, 64, 204.8, unified=True),
    Gpu(
        "agx-orin-32gb", "Jetson AGX Orin 32 GB", 87, 32, 204.8, aliases=("agx-orin",), unified=True
    ),
    Gpu("orin-nx-16gb", "Jetson Orin NX 16 GB", 87, 16, 102.4, unified=True),
    Gpu("orin-nx-8gb", "Jetson Orin NX 8 GB", 87, 8, 102.4, aliases=("orin-nx",), unified=True),
    Gpu(
        "orin-nano",
        "Jetson Orin Nano Super 8 GB",
        87,
        8,
        102,
        aliases=("orin", "orin-nano-8gb", "orin-nano-super"),
        unified=True,
    ),
    Gpu("orin-nano-4gb", "Jetson Orin Nano Super 4 GB", 87, 4, 51, "interface", unified=True),
    Gpu("dgx-spark", "DGX Spark", 121, 128, 273, aliases=("spark", "gb10"), unified=True),
)

VENDOR = ("nvidia", "geforce", "jetson", "tesla")
"""Words in front of a name that may be left out."""

NEAREST = 5
"""Names that an error suggests."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name; case, spaces and dashes do not matter.

    Raises:
        UsageError: there is none of that name; names the nearest.
    """
    named = {_plain(n): gpu for gpu in GPUS for n in (gpu.name, *gpu.aliases)}
    if (found := named.get(_plain(name))) is None:
        raise UsageError(
            f"No GPU is known as {name!r}. {nearest(name)}docs/gpus.md lists all names."
        )
    return found


def nearest(name: str) -> str:
    """Return a sentence with the names of GPUs that are most like one; empty if none is."""
    names = {_plain(n): n for gpu in GPUS for n in (gpu.name, *gpu.aliases)}
    plain = _plain(name)
    begins = [n for n in names if plain and n.startswith(plain)]
    alike = difflib.get_close_matches(plain, names, NEAREST, 0.5)
    close = [names[n] for n in dict.fromkeys([*begins, *alike])][:NEAREST]
    return f"Nearest names: {', '.join(close)}. " if close else ""


def _plain(name: str) -> str:
    """Return a name's letters and digits in lower case, without the vendor's words."""
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    for word in VENDOR:
        plain = plain.removeprefix(word)
    return plain.removesuffix("gpu")
