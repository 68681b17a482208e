"""The Triton kernels by name, each loaded when it is first used: Triton is not installed on machines without GPUs.

    from executor.kernels import on_demand as kernels

    kernels.rotate_pairs

Modules that import Triton are imported late, and only here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

MODULES = {
    "TensorDescriptor": "triton.tools.tensor_descriptor",
    **dict.fromkeys(("flagged_words", "one_shot", "two_shot"), "executor.kernels.all_reduce"),
    "add_slots": "executor.kernels.copies",
    "stamp": "executor.kernels.cycles",
    **dict.fromkeys(("add_norm", "gated", "rotate_and_store"), "executor.kernels.decoder_rows"),
    "gather_matmul": "executor.kernels.gather_matmul",
    **dict.fromkeys(("Place", "gather_specialised", "tile_descriptor"), "executor.kernels.gather_specialised"),
    "matmul_scatter": "executor.kernels.matmul_scatter",
    **dict.fromkeys(("attend_pages", "merge_shares"), "executor.kernels.paged_attention"),
    "rotate_pairs": "executor.kernels.decoder_rows",
}


def __getattr__(name: str) -> Any:
    """Load a kernel. Raises ImportError where Triton is missing."""
    if name not in MODULES:
        raise AttributeError(f"no kernel is called {name!r}")
    found = getattr(import_module(MODULES[name]), name)
    globals()[name] = found  # cached: each kernel is looked up once
    return found
