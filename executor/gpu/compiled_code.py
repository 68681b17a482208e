"""What torch.compile has made in this process."""

from __future__ import annotations

import sys

import torch

COMPILER = "torch._inductor.compile_fx"  # imported by whatever is compiled first


def forget_compiled() -> None:
    """Forget compiled code and the counts of it. Where nothing was compiled, the compiler is not imported for it, which
    takes 1 to 3 s.
    """
    if COMPILER not in sys.modules:
        return
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()  # noqa: SLF001 - the only count of what was compiled
