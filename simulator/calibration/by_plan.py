"""Costs that differ between the plans of a table, as columns: one value a plan.

With them, one plan is costed under many calibrations in a single walk, for example to see by how much an error of a
cost changes the step, or which costs fit measured runs best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.calibration.calibration import Calibration, LayerShape, RuntimeCosts
from simulator.calibration.measured_operators import MeasuredOperators
from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.model import Model
from simulator.kernels.operators import Work
from simulator.kernels.roofline import Packing, Roofline
from simulator.runtimes.parts import HostSpec

Rows = NDArray[np.intp]
FACTORS = ("kernel_factor", "layer_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorsByPlan(MeasuredOperators):
    """Operators of several calibrations: plan i has those of `parts[which[i]]`."""

    parts: tuple[MeasuredOperators, ...]
    which: Rows = field(compare=False)

    def seconds(
        self, work: Work, datasheet: Callable[[], Floats], *, dtype: str, runtime: str
    ) -> tuple[Floats, Floats]:
        plain = datasheet()
        found = [part.seconds(work, lambda: plain, dtype=dtype, runtime=runtime) for part in self.parts]
        return self._of_each([seconds for seconds, _ in found]), self._of_each([source for _, source in found])

    def packing_factor(self, packing: Packing, usual: Floats | float) -> Floats:
        return self._of_each([part.packing_factor(packing, usual) for part in self.parts])

    def update_bytes_per_s(self, param_dtype: str) -> float | None:
        return self.parts[0].update_bytes_per_s(param_dtype)  # the calibrations of one table never differ in this

    def take(self, rows: Rows) -> OperatorsByPlan:
        return replace(self, which=self.which[rows])

    def _of_each(self, values: Sequence[Floats]) -> Floats:
        columns = np.stack([np.broadcast_to(value, self.which.shape) for value in values])
        return np.asarray(columns[self.which, np.arange(len(self.which))])


def operators_by_plan(calibrations: Sequence[Calibration]) -> MeasuredOperators:
    """Return the operators of each plan's calibration; the operators themselves where all plans have the same."""
    parts = list({id(one.operators): one.operators for one in calibrations}.values())
    if len(parts) == 1:
        return parts[0]
    places = {id(part): place for place, part in enumerate(parts)}
    return OperatorsByPlan(parts=tuple(parts), which=np.array([places[id(one.operators)] for one in calibrations]))


def host_by_plan(hosts: Sequence[HostSpec]) -> HostSpec:
    """Return the host costs of all plans; a cost that differs between plans is an array of shape (plans,)."""
    first = hosts[0]
    changed = {}
    for one in fields(HostSpec):
        values = [getattr(host, one.name) for host in hosts]
        if any(value != values[0] for value in values):
            changed[one.name] = np.array(values, dtype=np.float64)
    return replace(first, **changed)  # type: ignore[arg-type]  # columns stand for numbers


def roofline_by_plan(
    roofline: Roofline, costs: Sequence[RuntimeCosts], model: Model, seq_len: int, table: PlanTable
) -> Roofline:
    """Return the roofline with each plan's runtime costs; for layer shapes that the runtime ran, with those of the
    shape.
    """
    shapes = (table["micro_batch_size"] * seq_len, table["tp"], table["cp"])
    factors = [
        one.factors(LayerShape(hidden=model.hidden, ffn=model.ffn, vocab=model.vocab, tokens=tokens, tp=tp, cp=cp))
        for one, tokens, tp, cp in zip(costs, *(column.astype(int).tolist() for column in shapes), strict=True)
    ]
    columns = dict(zip(FACTORS, np.array(factors).T, strict=True))
    return replace(roofline, **columns)  # columns stand for numbers


def taken_host(host: HostSpec, rows: Rows) -> HostSpec:
    """Return the host costs of the plans `rows`."""
    columns: dict[str, Any] = {
        one.name: value[rows] for one in fields(HostSpec) if isinstance(value := getattr(host, one.name), np.ndarray)
    }
    return replace(host, **columns) if columns else host


def taken_roofline(roofline: Roofline, rows: Rows) -> Roofline:
    """Return the kernel times of the plans `rows`."""
    columns: dict[str, Any] = {
        name: value[rows] for name in FACTORS if isinstance(value := getattr(roofline, name), np.ndarray)
    }
    measured = roofline.measured
    if isinstance(measured, Calibration) and isinstance(measured.operators, OperatorsByPlan):
        columns["measured"] = replace(measured, operators=measured.operators.take(rows))
    return replace(roofline, **columns)
