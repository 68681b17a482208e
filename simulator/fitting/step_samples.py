"""Operators seen inside training steps, compared with the same operators alone.

A kernel in a step runs next to collectives and at other clocks than one that a calibration repeats until the GPU is
hot. The effect is nearly the same for all products of a step. It is therefore one number: the median, over the shapes
measured both ways, of the time in the step divided by the time alone. Shapes measured only in the step are divided by
it and are then used like the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from simulator.calibration.operator_curves import AttentionCurve, MatmulCurve, attention_flops
from topology.profile.samples import OperatorSample

STEP = "step"
FEWEST = 3  # least number of shapes measured both ways
Exact = Mapping[tuple[Any, ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneTimes:
    """Standalone times of operators that a calibration has: measured ones by key, curves by type."""

    exact: Exact
    matmuls: Mapping[str, MatmulCurve]
    attention: Mapping[tuple[str, int, str], AttentionCurve]

    def seconds(self, sample: OperatorSample) -> float | None:
        """Return an operator's seconds alone: as measured, else by its curve; None without either."""
        known = self.exact.get(exact_key(sample))
        if known is not None:
            return known
        shape = {axis: np.array([float(size)]) for axis, size in sample.shape.items()}
        if sample.kind == "matmul":
            curve = self.matmuls.get(sample.dtype)
            if curve is None:
                return None
            batch = shape.get("batch", np.ones(1))
            return float(curve.seconds(shape["m"], shape["n"], shape["k"], batch, sample.direction)[0])
        found = self.attention.get((sample.dtype, sample.shape["d"], sample.direction))
        if found is None:
            return None
        flops = np.array([attention_flops(sample.shape, sample.direction)])
        return float(found.seconds(flops, shape["s"], shape["S"], shape["b"] * shape["a"])[0])


def exact_key(sample: OperatorSample) -> tuple[Any, ...]:
    """Return the key of a product or a causal attention in `Calibration.exact`."""
    shape = sample.shape
    if sample.kind == "matmul":
        sizes = (shape.get("batch", 1), shape["m"], shape["n"], shape["k"])
        return "matmul", sample.dtype, sample.direction, *map(float, sizes)
    sizes = (shape["b"] * shape["a"], shape["s"], shape["S"], shape["d"])
    return "attention", sample.dtype, sample.direction, *map(float, sizes), 1.0


def usable(samples: Iterable[OperatorSample]) -> list[OperatorSample]:
    """Return the samples taken inside steps that stand for an operator of a plan.

    Products of experts are left out, since their tokens are not evenly distributed; so is attention of some queries to
    other ranks' keys, which is part of a larger one.
    """
    return [
        s
        for s in samples
        if s.regime == STEP
        and not s.invalid
        and s.seconds > 0
        and s.shape.get("batch", 1) == 1
        and (s.kind == "matmul" or (s.kind == "attention" and s.shape["s"] == s.shape["S"]))
    ]


def in_step_ratio(samples: Iterable[OperatorSample], alone: StandaloneTimes) -> float | None:
    """Return the median time in the step over the time alone; None with too few shapes measured both ways."""
    ratios = [s.seconds / known for s in samples if (known := alone.exact.get(exact_key(s))) is not None]
    return median(ratios) if len(ratios) >= FEWEST else None


def standalone_from_steps(samples: Iterable[OperatorSample], alone: StandaloneTimes) -> dict[tuple[Any, ...], float]:
    """Return the standalone times of operators that were measured only inside steps."""
    seen = usable(samples)
    by = in_step_ratio(seen, alone)
    if by is None:
        return {}
    return {exact_key(s): s.seconds / by for s in seen if exact_key(s) not in alone.exact}
