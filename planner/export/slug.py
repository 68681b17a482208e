"""Names where a tool allows few characters: lower-case letters, digits and dashes, as DNS labels are (RFC 1123)."""

from __future__ import annotations

import hashlib
import re

LONGEST = 40


def slug(name: str) -> str:
    """Return a DNS label that stands for `name`: itself where it is one, else cleaned, with a hash so that names differ."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if name and cleaned == name and len(name) <= LONGEST:
        return name
    return f"{cleaned[:LONGEST].strip('-') or 'job'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
