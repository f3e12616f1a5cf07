"""The type of an object that was read from JSON, or is written as it."""

from __future__ import annotations

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""An object of JSON by its keys; of values that were read, nothing is checked yet."""
