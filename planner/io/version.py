"""The version of this installation."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Return the installed version, or `0+unknown` when run from a source tree that was never installed."""
    try:
        return installed_version("meshwright")
    except PackageNotFoundError:
        return "0+unknown"
