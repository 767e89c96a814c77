"""Classes of libraries that a user may have imported."""

import sys
from typing import Any


def imported(module: str, name: str) -> Any:
    """Return a class of a module for `isinstance`, without importing it: an empty tuple where nobody has
    imported the module, or another thread is about to, because nobody can have an instance then."""
    return getattr(sys.modules.get(module), name, ())
