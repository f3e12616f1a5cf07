"""Layers of packages that are not installed."""

from __future__ import annotations

from typing import Any

LAYERS: dict[str, dict[str, Any]] = {}
