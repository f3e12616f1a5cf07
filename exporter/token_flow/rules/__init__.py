"""Rules of operators, registered by the import of their modules: each file of this folder."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
