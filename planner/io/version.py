"""The version of this installation."""

from __future__ import annotations


def version() -> str:
    """Return the installed version, or `0+unknown` when run from a source tree that was never installed."""
    # slow to import, and few answers need the version
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "0+unknown"
