"""Names of transformers that are not public: looked up where they were, then wherever they went."""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from linexport.errors import EnvironmentProblemError
from linexport.system.versions import TRANSFORMERS

log = logging.getLogger(__name__)


def find(home: str, name: str) -> Any:
    """Return what a module of transformers has by a name, or another of its modules that is loaded.

    Args:
        home: the module in the releases that are tested, such as "integrations.moe".
        name: in that module.

    Raises:
        EnvironmentProblemError: no module has it.
    """
    module = f"{TRANSFORMERS.package}.{home}"
    try:
        found = vars(importlib.import_module(module)).get(name)
    except ImportError:
        found = None
    if found is not None:
        return found
    for other, loaded in list(sys.modules.items()):
        if other.startswith(f"{TRANSFORMERS.package}.") and name in getattr(loaded, "__dict__", {}):
            log.info("%s.%s is in %s now", module, name, other)
            return vars(loaded)[name]
    raise EnvironmentProblemError(
        f"There is no {module}.{name}, which linexport needs to convert this model, and no other "
        f"module of {TRANSFORMERS.package} has it. {TRANSFORMERS.advice()}"
    )
