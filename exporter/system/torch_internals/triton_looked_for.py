"""PyTorch's own look for triton, done before anything else makes a package of that name."""

from __future__ import annotations

from linexport.system.torch_internals import Internal

IS_THERE = Internal(
    "torch.utils._triton",
    "has_triton_package",
    "lets PyTorch note that triton is not installed",
    "PyTorch may take a package that is made for fla or mamba_ssm for triton",
)

NAMES = Internal(
    "torch._inductor.runtime.triton_compat",
    "triton",
    "lets torch.compile note that triton is not installed",
    "torch.compile may take a package that is made for fla or mamba_ssm for triton",
)


def look() -> None:
    """Let PyTorch look for triton now; it remembers what it found."""
    is_there = IS_THERE.find()
    if is_there is not None:
        is_there()
    NAMES.find()
