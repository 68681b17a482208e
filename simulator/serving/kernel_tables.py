"""Kernels of engines as tables of kernels by themselves have them: products, experts, attention over prompts and
of answers, sums over ranks. The TOML files say what each number means and where it is from.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import numpy as np

from simulator.columns.plan_table import Floats
from topology.codec import convert

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernels:
    """Parts of the time of expert kernels, which add up; meanings in expert_kernels.toml."""

    fixed_s: float
    expert_s: float
    read: float
    rate: float
    passed: float
    routes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKernels:
    """Times of a product besides its arithmetic; meanings in product_kernels.toml."""

    fixed_s: float
    depth_s: float
    read: float
    cast: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKernels:
    """Parts of the time of attention over prompts; meanings in prompt_kernels.toml."""

    fixed_s: float
    passed: float
    query: float
    tail: float
    share: dict[str, float]
    alone: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerKernels:
    """Parts of the time of attention of answers; meanings in answer_kernels.toml."""

    fixed_s: float
    program_s: float
    hidden: float
    read: dict[str, float]

    def seconds(self, waiting: float, read_s: float) -> float:
        """Return the seconds of `waiting` programs and of keys that are read in `read_s`, without the fixed part."""
        programs_s = self.program_s * waiting
        return programs_s + max(0.0, read_s - self.hidden * programs_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceKernels:
    """Times of an all-reduce over peer memory; meanings in reduce_kernels.toml."""

    once_s: float
    once_rate: float
    twice_s: float
    rank_s: float
    twice_rate: float

    def seconds(self, nbytes: Floats, ranks: int, link_bytes_per_s: float) -> Floats:
        """Return seconds of summing `nbytes` over `ranks`, in one exchange or in two, whichever is faster."""
        once = self.once_s + nbytes * (ranks - 1) / (self.once_rate * link_bytes_per_s)
        share = 2 * (ranks - 1) / ranks
        twice = self.twice_s + self.rank_s * (ranks - 2) + nbytes * share / (self.twice_rate * link_bytes_per_s)
        return np.asarray(np.minimum(once, twice))


@cache
def expert_kernels() -> dict[tuple[str, ...], ExpertKernels]:
    """Return the kernels of experts by (engine, generation, format)."""
    return _read("expert_kernels.toml", ExpertKernels, levels=3)


@cache
def product_kernels() -> dict[tuple[str, ...], ProductKernels]:
    """Return the kernels of products by (generation, format)."""
    return _read("product_kernels.toml", ProductKernels, levels=2)


@cache
def prompt_kernels() -> dict[tuple[str, ...], PromptKernels]:
    """Return the kernels of attention over prompts by (engine, architecture or generation, kind)."""
    return _read("prompt_kernels.toml", PromptKernels, levels=3)


@cache
def answer_kernels() -> dict[tuple[str, ...], AnswerKernels]:
    """Return the kernels of attention of answers by (engine, architecture or generation, kind)."""
    return _read("answer_kernels.toml", AnswerKernels, levels=3)


@cache
def reduce_kernels() -> dict[tuple[str, ...], ReduceKernels]:
    """Return the kernels of all-reduces by (name, generation)."""
    return _read("reduce_kernels.toml", ReduceKernels, levels=2)


def by_width(shares: dict[str, float], width: float) -> float:
    """Return the share that is listed for heads of a width: of the next listed one, or of the widest."""
    widths = sorted(map(int, shares))
    return shares[str(next((listed for listed in widths if listed >= width), widths[-1]))]


def _read(where: str, kind: type[T], *, levels: int) -> dict[tuple[str, ...], T]:
    """Return the tables of a file by their names, which have as many parts as `levels`."""
    found: dict[tuple[str, ...], Any] = {
        (): tomllib.loads((resources.files("simulator") / "serving" / where).read_text("utf-8"))
    }
    for _ in range(levels):
        found = {(*key, name): part for key, table in found.items() for name, part in table.items()}
    return {key: convert(table, kind, where=f"{where} [{'.'.join(key)}]") for key, table in found.items()}
