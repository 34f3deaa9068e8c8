"""Mutants of algorithms that are not synchronous SGD: a file for each family of engines, with its `MUTANTS`.

Each algorithm has four at least. `make power` trains them, and tests/test_algorithm_mutants.py asks for their names.
"""

import importlib
import pkgutil

_MODULES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
ALGORITHM_MUTANTS = [mutant for module in _MODULES for mutant in module.MUTANTS]
