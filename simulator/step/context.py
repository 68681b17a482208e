"""The context of costs: everything in a step that costs depend on, except the operator or transfer itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from simulator.calibration.by_plan import taken_host, taken_roofline
from simulator.calibration.calibration import Calibration
from simulator.collectives.group_times import GroupTimes
from simulator.collectives.pushed import PUSHED, host_calls
from simulator.columns.plan_table import Floats, PlanTable
from simulator.config.adapter import BASE_BYTES
from simulator.config.runtime import DTYPE_BYTES, Runtime
from simulator.kernels.low_precision import recipe_of
from simulator.kernels.operators import FIXED_DTYPE_BYTES
from simulator.kernels.roofline import Roofline
from simulator.overlap.site_costs import SiteRates
from simulator.runtimes.adapted import trained_dtype
from simulator.runtimes.library import RuntimeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CostContext:
    """Everything a block's cost depends on besides its operators.

    `own_costs`: costs of host and kernels are arrays of shape (plans,), since plans have calibrations of their own or
    layers that were measured.
    """

    table: PlanTable
    sizes: Mapping[str, Floats]
    roofline: Roofline
    groups: GroupTimes
    runtime: Runtime
    spec: RuntimeSpec
    site: SiteRates = field(default_factory=SiteRates)
    calibration: Calibration | None = None
    own_costs: bool = False

    @property
    def in_layers(self) -> CostContext:
        """The context for operators of layers."""
        inside = self.roofline.in_layers
        return self if inside is self.roofline else replace(self, roofline=inside)

    def take(self, rows: NDArray[np.intp]) -> CostContext:
        """Return the context of the plans `rows`."""
        table, every = self.table.take(rows), len(self.table)
        spec, roofline = self.spec, self.roofline
        if self.own_costs:
            spec = replace(spec, host=taken_host(spec.host, rows))
            roofline = taken_roofline(roofline, rows)
        return replace(
            self,
            table=table,
            spec=spec,
            roofline=roofline,
            sizes={name: np.broadcast_to(size, (every,))[rows] for name, size in self.sizes.items()},
            groups=self.groups.take(rows, table),
        )

    def held_sms(self, op: str) -> float | None:
        """Return the SMs that data-parallel traffic takes from kernels; None where not measured."""
        return self.calibration.held_sms(op) if self.calibration is not None and op not in PUSHED else None

    def collective_host_s(self, op: str, ranks: Floats) -> Floats | float:
        """Return the host's seconds to issue a collective: what layers do not count already (`HostSpec.fsdp_layer_s`),
        and the calls of pushes beyond NCCL's one.
        """
        if op not in PUSHED:
            return self.spec.host.collective_s
        return np.asarray(self.spec.host.collective_s + (host_calls(op, ranks) - 1.0) * self.site.rates.host_s)

    def dtype_bytes(self, name: str) -> float:
        """Return the bytes of one number of a type named in descriptions. For low types: as products read it (`low`),
        with all its copies (`low_copies`), the copy in the other direction alone (`low_transposed`), and as
        data-parallel ranks gather parameters (`gathered`). `packed` is the type of frozen weights, `trained` that of
        trained parameters.
        """
        match name:
            case "low" | "low_copies" | "low_transposed" | "gathered":
                return self._low_bytes(name)
            case "packed":
                adapter = self.runtime.adapter
                kept = adapter.base_weights if adapter is not None else ""
                return BASE_BYTES[kept] if kept else self.dtype_bytes("param")
            case "compute":
                named = self.runtime.activation_dtype
            case "param":
                named = self.runtime.param_dtype
            case "trained":
                named = trained_dtype(self.runtime, wide_adapters=self.spec.wide_adapters)
            case "reduce":
                named = self.runtime.reduce_dtype
            case _:
                return FIXED_DTYPE_BYTES[name]
        return float(DTYPE_BYTES[named])

    def _low_bytes(self, name: str) -> float:
        recipe, low = recipe_of(self.runtime), self.spec.low_precision
        if recipe is None or (name == "gathered" and not (low and low.gathers_weights and recipe.dtype == "float8")):
            return self.dtype_bytes("compute")
        architecture = self.roofline.gpu.architecture
        if name == "low_transposed":
            return recipe.transposed_bytes(architecture)
        return recipe.written_bytes(architecture) if name == "low_copies" else recipe.element_bytes
