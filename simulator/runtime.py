"""The software that runs the plan: which framework, eager or compiled, in which types."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """`name` selects a description of operator sequences (`runtimes/*.toml`); the rest is how it was configured.

    `param_dtype` is what parameters are stored in, `compute_dtype` what matmuls run in, `reduce_dtype` what gradients
    are reduced in.
    """

    name: str = "torchtitan"
    version: str | None = None
    compile: bool = False
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"
    optimizer: str = "adamw"
