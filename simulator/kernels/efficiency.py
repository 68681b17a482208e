"""What share of a datasheet's rates kernels reach, by architecture (efficiency.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from simulator.columns.plan_table import Floats
from simulator.kernels.operators import Work
from topology.codec import convert


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionEfficiency:
    forward: float
    backward: float
    ramp_s: float
    head_dim_64: float
    rows: float
    ramp_backward_s: float = 0.0  # 0: as forward

    def of_width(self, width: Floats | float) -> Floats:
        """Return the share of the rate that heads of a width reach."""
        return np.where(np.asarray(width) < 128, self.head_dim_64, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedEfficiency:
    """The kernel that multiplies all experts, in a step: `rows` and `columns` of its one tile, elements along k that
    its pipeline takes to fill beyond those of other products (`ramp_k`), and over other products its `time` but for
    these, what `clocks` change of it, and the `power` it draws.
    """

    rows: float
    columns: float
    ramp_k: float
    time: float
    clocks: float
    power: float

    def factor(self, work: Work) -> Floats:
        """Return the time of its arithmetic over that of as many products of one size."""
        rows, columns, k = np.asarray(work.grouped_rows), np.asarray(work.n), np.asarray(work.k)
        # A router's rows end anywhere within a tile, so half a tile is wasted for each expert. Weight gradients add up
        # over rows.
        wasted = np.where(rows == k, 1.0, 1.0 + self.rows / 2.0 / np.maximum(rows, self.rows))
        wasted = wasted * np.ceil(columns / self.columns) * self.columns / columns
        return np.asarray(self.time * wasted * (1.0 + self.ramp_k / np.maximum(k, self.rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of the datasheet's rates that kernels reach on an architecture; see efficiency.toml for meaning and
    source.
    """

    reference: str
    reference_w: float
    reference_flops: float
    burst: float
    sustained: float
    power_exponent: float
    ramp_k: float
    hbm: float
    kernel_s: float
    simt: float
    unit_s: dict[str, float]
    rested: float = 1.0
    updated: float = 1.0
    float8: float = 0.0
    float4: float = 0.0
    tiles: tuple[tuple[float, float, float], ...] = ()
    scattered: float = 1.0
    accumulated: float = 0.0
    grouped: GroupedEfficiency | None = None
    attention: dict[str, AttentionEfficiency]


@cache
def efficiency(architecture: str) -> Efficiency:
    """Return the efficiency of an architecture; without figures of its own, that of its nearest relative."""
    text = (resources.files("simulator") / "kernels" / "efficiency.toml").read_text("utf-8")
    known = tomllib.loads(text)
    tables = {k: v for k, v in known.items() if isinstance(v, dict) and k not in {"source", "unit_s"}}
    relative = {
        "turing": "ampere",
        "volta": "ampere",
        "pascal": "ampere",
        "blackwell ultra": "blackwell",
        "rubin": "blackwell",
    }
    name = architecture.lower()
    name = name if name in tables else relative.get(name, "ampere")
    return convert(
        {**tables[name], "sustained": known["sustained"], "unit_s": known["unit_s"]},
        Efficiency,
        where=f"efficiency.toml [{name}]",
    )
