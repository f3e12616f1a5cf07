"""linexport: export and deployment toolkit for PyTorch models with linear attention."""

from __future__ import annotations

__version__ = "0.1.0"
