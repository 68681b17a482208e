"""Launch a Triton kernel without looking at its arguments again.

Triton's own launch inspects every argument to find the variant that was compiled for it: 20 to 50 µs of the host's time,
longer than many of these kernels run. Here the caller names what decides the variant.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

_compiled: dict[Hashable, Any] = {}


def launch(kernel: Any, programs: int, args: Sequence[Any], *, variant: Hashable, **options: int) -> None:
    """Run `programs` programs of `kernel` on the current stream.

    `variant` has to tell apart all that Triton compiles apart: device, types, constexpr values, options, and of integers
    that are not exempt (`do_not_specialize`) whether they are 1 or multiples of 16. Pointers are aligned to 16 bytes.
    """
    key = (kernel, variant)
    found = _compiled.get(key)
    if found is None:
        _compiled[key] = kernel[programs, 1, 1](*args, **options)
    else:
        found[programs, 1, 1](*args)
