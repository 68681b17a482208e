"""Which plan: legality, enumeration, search, and the command line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.configs.any_kind import check

__all__ = ["check"]


def __getattr__(name: str) -> Any:
    """Load what this package offers when it is asked for: every command imports the package, and few need all of it."""
    if name not in __all__:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    return getattr(import_module("planner.configs.any_kind"), name)
