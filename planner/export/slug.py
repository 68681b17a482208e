"""Job names for tools that allow only DNS labels (RFC 1123): lower-case letters, digits and dashes."""

from __future__ import annotations

import hashlib
import re

MAX_CHARACTERS = 40


def slug(name: str) -> str:
    """Return `name` if it is a DNS label, otherwise a label made from it, with a hash that keeps names distinct."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if name and cleaned == name and len(name) <= MAX_CHARACTERS:
        return name
    return f"{cleaned[:MAX_CHARACTERS].strip('-') or 'job'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
