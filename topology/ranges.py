"""The largest and smallest values that decoded input may hold, by the unit in a field's name; the longest texts and
lists.

A typed decoder lets any number pass as a rate or a count. Names here end in their SI unit, so one walk over a decoded
value finds every number that is not finite, of the wrong sign, or beyond anything that can be built, and every text or
list without bound. Whether values agree with each other is checked by the `verify` of each type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

Range = tuple[float, float]

MAX_TEXT = 1 << 16  # characters; names of generated kernels are the longest
MAX_ENTRIES = 1 << 21  # of a list or a table: twice the ranks of the largest plan
MAX_DEPTH = 32
SHOWN = 40  # characters of a value in a message

COUNT: Range = (0, 1 << 53)  # exact as a float
NUMBER: Range = (-1e18, 1e18)
# By the end of a name; the longest matching end comes first.
BY_UNIT: tuple[tuple[str, Range], ...] = (
    ("bytes_per_s", (0, 1e15)),
    ("tokens_per_s", (0, 1e15)),
    ("tokens_per_s_per_gpu", (0, 1e15)),
    ("tflops_per_gpu", (0, 1e9)),
    ("flops_per_gpu", (0, 1e27)),
    ("seconds", (0, 1e9)),
    ("headroom_bytes", (-(2.0**60), 2.0**60)),
    ("difference_s", (-1e9, 1e9)),
    ("bytes", (0, 2.0**60)),
    ("spread", (0, 1e6)),
    ("flops", (0, 1e18)),
    ("_hz", (0, 1e11)),
    ("_s", (0, 1e9)),
    ("_w", (0, 1e6)),
    ("_c", (-274, 1000)),
    ("numa", (-1, 1 << 20)),  # -1: the kernel does not know the NUMA node
)


def out_of_range(value: Any, own: Mapping[str, Range], name: str = "", path: str = "") -> Iterator[str]:
    """Yield a sentence for every part of `value` outside its range; `own` has ranges by a field's full name.

    `value` is a dataclass or plain data. Entries of a list or table have the range of the field that holds it, unless
    their key names a unit.
    """
    if path.count(".") + path.count("[") > MAX_DEPTH:
        yield f"{path[:200]} is nested deeper than {MAX_DEPTH} levels"
    elif isinstance(value, bool) or value is None:
        return
    elif isinstance(value, (int, float)):
        low, high = own.get(name) or _range_of(name, value)
        if not (low <= value <= high and math.isfinite(value)):
            yield f"{path or 'it'} is {shown(value)}, expected {low:g} to {high:g}"
    elif isinstance(value, str):
        if len(value) > MAX_TEXT:
            yield f"{path or 'it'} has {len(value)} characters, expected at most {MAX_TEXT}"
    elif isinstance(value, (list, tuple, Mapping)) and len(value) > MAX_ENTRIES:
        yield f"{path or 'it'} has {len(value)} entries, expected at most {MAX_ENTRIES}"
    else:
        for part, label, at in _parts(value, name):
            yield from out_of_range(part, own, label, f"{path}{at}" if path or at[0] != "." else at[1:])


def _parts(value: Any, name: str) -> Iterator[tuple[Any, str, str]]:
    """Yield (part, the name that decides its range, its path from `value`) of a dataclass, a table or a list."""
    if is_dataclass(value):
        for one in fields(value):
            yield getattr(value, one.name), one.name, f".{one.name}"
    elif isinstance(value, Mapping):
        for key, part in value.items():
            label = str(key)
            if len(label) > MAX_TEXT:
                yield label, "", f".{label[:SHOWN]}"
            if not isinstance(part, str) or len(part) > MAX_TEXT:
                yield part, label if _unit_of(label) else name or label, f".{label[:SHOWN]}"
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield part, name, f"[{index}]"


@lru_cache(maxsize=4096)
def _unit_of(name: str) -> Range | None:
    return next((limits for unit, limits in BY_UNIT if name.endswith(unit)), None)


def _range_of(name: str, value: float) -> Range:
    return _unit_of(name) or (COUNT if isinstance(value, int) else NUMBER)


def shown(value: Any) -> str:
    """Return a value as a person typed it, cut to SHOWN characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
