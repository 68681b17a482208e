"""How many examples tests of properties try: every night others, and in the gate half as many, always the same."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

EXPLORES = os.environ.get("MESHWRIGHT_HYPOTHESIS", "gate") != "gate"


def examples(every_night: int, **more: Any) -> settings:
    """Return the settings of a test that tries so many examples every night."""
    return settings(max_examples=every_night if EXPLORES else -(-every_night // 2), **more)
