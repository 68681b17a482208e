"""Make text safe for a terminal. Separate from `output.py`, whose libraries take longer to import than `planner
--help`.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return `text` with control characters escaped: names come from files, and could contain terminal commands."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
