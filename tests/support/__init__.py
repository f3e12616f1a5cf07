"""Helpers that several tests import: where they lie is fixed here.

``factories/`` holds modules as a user writes them; pytest puts it on Python's path
(pyproject.toml), so that ``small_models:small`` is a source. ``scripts/`` holds programs that
tests run as processes of their own.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FACTORIES = Path(__file__).with_name("factories")
SCRIPTS = Path(__file__).with_name("scripts")
