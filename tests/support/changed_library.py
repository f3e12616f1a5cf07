"""Copies of an installed package with other names, as its next releases may have them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

RENAMED = {
    r"@deprecate_kwarg\([^)]*\)\n\s*": "",
    r"\battention_mask\b": "padding_mask",
    r"\b(?:past_key_values|cache_params|(?<!functools\.)(?<!batching\.)cache)\b": "kept_states",
}
"""Parameters for mask and cache, and all that is called so, in modeling files of transformers.
Names they had before are no longer taken."""

CALLED = re.compile(r"models/\w+/modeling_|masking_utils|modeling_(outputs|layers|utils)")
"""Files of transformers in which these are parameters."""

MODULES = {
    "cache_utils": "cache_layers",
    "masking_utils": "attention_masks",
    "modeling_rope_utils": "rotary_positions",
}
"""Modules of transformers that are called otherwise."""

FUNCTIONS = {
    "torch_chunk_gated_delta_rule": "delta_rule_by_chunks",
    "torch_recurrent_gated_delta_rule": "delta_rule_by_tokens",
    "mamba2_chunk_scan": "scan_by_chunks",
    "mamba_selective_scan": "scan_of_channels",
    "causal_conv1d_fn": "short_convolution",
}
"""Functions of its modeling files that are called otherwise."""


CLASSES = {
    "MiniMaxLightningAttention": "MiniMaxFastMixer",
    "RwkvSelfAttention": "RwkvTimeMix",
    "RwkvFeedForward": "RwkvChannelMix",
    "ZayaCCAProjection": "ZayaCompressedProjection",
    "Qwen4ExpTextAttention": "Qwen4ExpTextMixer",
    "Qwen4ExpTextQSAIndexer": "Qwen4ExpTextChooser",
}
"""Classes of its modeling files that are called otherwise, whose methods are replaced."""

WRITTEN_ANEW = {
    r"\bcausal_conv1d_fn\b": "short_convolution",
    r"(?s)(def short_convolution\(\n    hidden_states: torch.Tensor,\n    )weight(: .*?\n\):\n)": (
        r"\1taps\2    weight = taps\n"
    ),
}
"""A function of modeling files with another name, and another one for one of its parameters."""


def rewritten(package: str, folder: Path) -> Path:
    """Write a copy of transformers in which a function has another name and other parameters."""
    return _changed(package, folder, WRITTEN_ANEW, re.compile(r"models/lfm2/modeling_"))


def renamed(package: str, folder: Path) -> Path:
    """Write a copy of transformers whose parameters have other names."""
    return _changed(package, folder, RENAMED, CALLED)


def with_other_classes(package: str, folder: Path) -> Path:
    """Write a copy of transformers whose layers are classes of other names."""
    names = {rf"\b{name}\b": other for name, other in CLASSES.items()}
    return _changed(package, folder, names, re.compile("models/"))


def _changed(package: str, folder: Path, names: Mapping[str, str], files: re.Pattern[str]) -> Path:
    """Write a copy of a package with words replaced; return the folder to import it from.

    Args:
        package: that is installed.
        folder: to write to.
        names: what takes the place of each regular expression.
        files: whose words are.
    """
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    source, copy = Path(spec.origin).parent, folder / package
    for path in source.rglob("*"):
        place = copy / path.relative_to(source)
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".py":
            shutil.copyfile(path, place)
            continue
        text = path.read_text(encoding="utf-8")
        if files.search(path.relative_to(source).as_posix()):
            for name, other in names.items():
                text = re.sub(name, other, text)
        place.write_text(text, encoding="utf-8")
    return folder


def moved(package: str, folder: Path) -> Path:
    """Write a copy of transformers whose modules and functions have other names and places."""
    names = {rf"\b{name}\b": other for name, other in (MODULES | FUNCTIONS).items()}
    _changed(package, folder, names, re.compile(""))
    for name, other in MODULES.items():
        (folder / package / f"{name}.py").rename(folder / package / f"{other}.py")
    return folder
