"""How a layer's kernels are launched if a run states it: products of experts, and kernels in CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from simulator.kernels.operators import OperatorSpec

# Host time of a further product that TransformerEngine's GroupedLinear issues in its own loop, over that of a launch
# through Python and autograd (transformer_engine/common/gemm: nvte_multi_stream_cublas_gemm). Source: assumed.
PRODUCT_LAUNCH = 0.2
# What Python and autograd do around it for each expert, in launches: views and saved tensors in the forward pass; in
# the backward pass a placeholder for the weight's gradient, and the hook of Megatron's DDP on the weight.
# Source: tests/tools/megatron_operators.py on a CPU, the middle of three runs (0.27 to 0.50, 0.99 to 1.71).
AROUND_EXPERT = 0.43, 1.56


def multiplied_as(products: str, operators: Sequence[OperatorSpec]) -> list[OperatorSpec]:
    """Return the operators with products of experts as a runtime states them (`EXPERT_PRODUCTS`)."""
    found = []
    for operator in operators:
        product = bool(operator.matmul) and operator.matmul.split()[0] == "e"
        between = "r fe" in operator.writes and not product and not operator.collective
        if product and products == "te_grouped":
            found.append(replace(operator, by_expert=PRODUCT_LAUNCH, around_expert=AROUND_EXPERT))
        elif (product or between) and products == "loop":
            found.append(replace(operator, by_expert=1.0, one_by_one=True))
        else:
            found.append(operator)
    return found


def replayed(operators: Sequence[OperatorSpec], patterns: Sequence[str]) -> list[OperatorSpec]:
    """Return the operators with each sequence in a CUDA graph launched by its first operator."""
    found: list[OperatorSpec] = []
    inside = False
    for operator in operators:
        held = any(fnmatchcase(operator.name, pattern) for pattern in patterns)
        found.append(replace(operator, replayed=True) if held and inside else operator)
        inside = held
    return found
