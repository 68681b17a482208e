"""Measurements of one machine as costs of plans: operators, collectives, overlap, contention, runtimes.

A `Calibration` is made once, from a profile, where a program's inputs are read
(`simulator.fitting.calibration_fit.calibrated`). Everything that costs a plan gets the calibration, or None where
nothing was measured; then costs come from datasheets and published efficiencies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np

from simulator.calibration.measured_operators import MeasuredOperators
from simulator.calibration.operator_curves import Floats
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.measured import MeasuredCollectives
from simulator.config.overlap_sites import modes_in
from simulator.config.runtime import TF32, Runtime
from simulator.kernels.efficiency import efficiency
from simulator.kernels.low_precision import recipe_of
from simulator.kernels.operators import Work, WorkKind
from simulator.kernels.roofline import DATASHEET, Packing, Roofline
from simulator.overlap.site_costs import SITE_MODES, SiteRates
from simulator.runtimes.library import RuntimeSpec, attention_kernel, runtime_spec
from simulator.runtimes.parts import HostSpec
from topology.cluster import Cluster, GpuKind

# Host costs that only runtimes have which issue operators one by one from Python.
OF_DTENSORS = frozenset({"tp_layer_s", "selective_s"})
LOADING = frozenset({"data_token_s", "data_spread"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much a collective and compute slow each other down while both run: the factor on the time of each."""

    compute: float = 1.0
    collective: float = 1.0
    samples: int = 0

    @property
    def lost(self) -> float:
        """Return seconds of compute lost for each second that the collective would take alone."""
        return self.collective * (1.0 - 1.0 / self.compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What kernel times of layers and head depend on: widths, vocabulary, tokens of a micro batch, and the ranks that
    share them.
    """

    hidden: int
    ffn: int
    vocab: int
    tokens: int
    tp: int
    cp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCosts:
    """Costs of a runtime, eager or compiled, as its runs of one and two layers showed them; see
    simulator.fitting.runtime_fit.

    `kernel_factor` multiplies kernel times, since clocks, caches and gaps inside a step differ from those of a kernel
    alone; `layer_factor` also multiplies those of layers, whose many short kernels differ more than the few of a head;
    `of_shapes` has both factors for shapes of layers that were run. `host` has fields of HostSpec that replace the
    description's. `collective_factor` multiplies the times of collectives, `network_factor` also those between nodes,
    to which each crossing adds `crossing_s` (`CollectiveModel`). `reserved` is measured over described memory,
    `activations` a further factor on memory that is no state. `flush_s` is added to a micro batch where the allocator
    has to return memory; None: as described. `host_speed` is the time of this host over that of the hosts in
    descriptions, `shown` the host's costs that occurred in its runs.
    """

    kernel_factor: float = 1.0
    layer_factor: float = 1.0
    of_shapes: dict[LayerShape, tuple[float, float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    collective_factor: float = 1.0
    network_factor: float = 1.0
    crossing_s: float = 0.0
    reserved: float = 1.0
    activations: float = 1.0
    flush_s: float | None = None
    spread: float = 0.0  # of the runs around the fit, relative
    runs: int = 0
    host_speed: float = 1.0
    shown: frozenset[str] = frozenset()

    def factors(self, shape: LayerShape) -> tuple[float, float]:
        """Return (factor of kernels, further factor of layers) for layers of a shape."""
        return self.of_shapes.get(shape, (self.kernel_factor, self.layer_factor))

    def slower(self, factor: float) -> RuntimeCosts:
        """Return the costs with all kernel times multiplied by a factor."""
        shapes = {shape: (factor * kernel, layer) for shape, (kernel, layer) in self.of_shapes.items()}
        return replace(self, kernel_factor=factor * self.kernel_factor, of_shapes=shapes)

    def held_bytes(self, described: Floats | float, state: Floats | float) -> Floats:
        """Return the expected memory where `described` bytes are described, of which `state` are parameters, gradients
        and optimizer.
        """
        if self.activations == 1.0:
            return np.asarray(self.reserved * described)
        kept = np.minimum(state, described)
        return np.asarray(self.reserved * (kept + self.activations * (described - kept)))

    def described_bytes(self, held: float, state: float) -> float:
        """Return the described bytes for which `held_bytes` gives `held`."""
        over = held / self.reserved - state
        return state + over / self.activations if over > 0 else held / self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measurements of one machine. Parts that were not measured are empty, and return costs from the datasheet.

    `contention` is by collective, `runtimes` by (runtime, compiled); `burst` is a large product's time after a rest
    over its time in a step of nothing but products. `gpu_measured`: there is more than collectives. `profile` is the
    fingerprint of the profile. `current` is false for a profile of another driver or of long ago, which does not narrow
    any range.
    """

    gpu: GpuKind
    operators: MeasuredOperators = field(default_factory=MeasuredOperators)
    collectives: MeasuredCollectives | None = None
    overlap: SiteRates = field(default_factory=SiteRates)
    contention: dict[str, Contention] = field(default_factory=dict)
    burst: float = 1.0
    runtimes: dict[tuple[str, bool], RuntimeCosts] = field(default_factory=dict)
    gpu_measured: bool = True
    profile: str = ""
    current: bool = True

    def runtime(self, name: str, *, compiled: bool) -> RuntimeCosts:
        """Return the costs of a runtime; neutral ones where it was not run.

        A runtime that was not run has the costs of the runtime that it is like, without the Python work that it does
        not do.
        """
        spec = runtime_spec(name)
        own = self.runtimes.get((spec.names[0], compiled))
        if own is not None or not spec.like:
            return own or RuntimeCosts()
        found = self.runtimes.get((spec.like, compiled), RuntimeCosts())
        kept = {k: v for k, v in found.host.items() if not (spec.host.plain_tensors and k in OF_DTENSORS)}
        return replace(found, host=kept)

    def ran(self, runtime: Runtime, costs: frozenset[str]) -> bool:
        """Return whether these costs of the host (`simulator.step.host.costs_in`) occurred in runs of a runtime."""
        return self.current and costs <= self.runtime(runtime.name, compiled=runtime.compile).shown

    @property
    def host_speed(self) -> float:
        """The time of this host over that of the hosts in descriptions; 1 where no runtime was run."""
        return next((costs.host_speed for costs in self.runtimes.values()), 1.0)

    def seconds(
        self, work: Work, datasheet: Callable[[], Floats], *, dtype: str, runtime: str
    ) -> tuple[Floats, Floats]:
        """Return (seconds, source) of a kernel in a step of nothing but products, one value a row; `datasheet` returns
        its seconds from the datasheet.

        Products at the power limit lose as much of what they reach by themselves as those of datasheets do.
        """
        seconds, source = self.operators.seconds(work, datasheet, dtype=dtype, runtime=runtime)
        if work.kind is WorkKind.MATMUL and dtype != "float32":
            alone = efficiency(self.gpu.architecture).sustained
            seconds = np.where(source == DATASHEET, seconds, seconds / alone)
        return seconds, source

    def packing_factor(self, packing: Packing, usual: Floats | float) -> Floats:
        """Return the measured time of one of FSDP's copies over its counted time; `usual` where not measured."""
        return self.operators.packing_factor(packing, usual)

    def update_bytes_per_s(self, param_dtype: str) -> float | None:
        """Return the bytes/s of clipping and updating, in terms of the bytes counted for them; None where not
        measured.
        """
        return self.operators.update_bytes_per_s(param_dtype)

    def contention_of(self, *ops: str) -> Contention | None:
        """Return by how much compute and collectives slow each other down; None where not measured.

        `ops` are the collectives in question; their mean, or that of all where none of them was measured.
        """
        if not self.contention:
            return None
        chosen = [self.contention[op] for op in ops if op in self.contention] or list(self.contention.values())
        return Contention(
            compute=float(np.mean([one.compute for one in chosen])),
            collective=float(np.mean([one.collective for one in chosen])),
        )

    def held_sms(self, op: str) -> float | None:
        """Return the SMs that a collective takes from kernels alongside it, None where that was not measured."""
        pair = self.contention_of(op)
        return None if pair is None else pair.lost * self.gpu.sm_count


def collectives_on(cluster: Cluster, calibration: Calibration | None) -> CollectiveModel:
    """Return the collective times of `cluster`: measured ones, else those of the model."""
    return CollectiveModel(cluster, measured=calibration.collectives if calibration is not None else None)


def overlap_of(calibration: Calibration | None) -> SiteRates:
    """Return the rates of the overlap modes; assumed ones where they were not measured, at the speed of this host."""
    if calibration is None:
        return SiteRates()
    site = calibration.overlap
    if site.source != "assumed" or calibration.host_speed == 1.0:
        return site
    return replace(site, rates=replace(site.rates, host_s=site.rates.host_s * calibration.host_speed))


def overlap_assumed(tp_overlaps: Iterable[str], calibration: Calibration | None) -> tuple[str, ...]:
    """Return what estimates of plans with these overlap modes assume, as sentences; empty where the modes were
    measured.
    """
    ours = sorted({mode for text in tp_overlaps for mode in modes_in(text) if mode in SITE_MODES})
    if not ours or overlap_of(calibration).source != "assumed":
        return ()
    return (f"overlap {', '.join(ours)} as measured on H200s (planner calibrate measures it here)",)


def calibrated_host(spec: RuntimeSpec, calibration: Calibration | None, *, compiled: bool) -> RuntimeSpec:
    """Return a runtime's description with the host costs that its runs of single layers showed."""
    if calibration is None:
        return spec
    found = calibration.runtime(spec.names[0], compiled=compiled).host
    if "launch_s" not in found and calibration.host_speed != 1.0:
        found = scaled_host(spec.host, calibration.host_speed) | found
    return replace(spec, host=replace(spec.host, **found)) if found else spec  # type: ignore[arg-type]  # floats all


def scaled_host(described: HostSpec, speed: float) -> dict[str, float]:
    """Return the described host costs of a runtime that was not run, multiplied by `speed`.

    Loading data is left out, since runtimes time it themselves.
    """
    costs = {field.name: getattr(described, field.name) for field in fields(described) if field.name not in LOADING}
    return {name: speed * value for name, value in costs.items() if isinstance(value, float)}


def roofline_of(
    cluster: Cluster,
    runtime: Runtime,
    spec: RuntimeSpec,
    calibration: Calibration | None,
    *,
    windowed: float = 0.0,
    documents: bool = False,
    sinks: bool = False,
) -> Roofline:
    """Return kernel times for a runtime on a cluster's slowest GPU.

    `windowed`: the share of attention's arithmetic in layers with a sliding window (`plan_table.windowed_share`).
    `documents`, `sinks`: see `attention_kernel`.
    """
    costs = RuntimeCosts()
    if calibration is not None:
        costs = calibration.runtime(spec.names[0], compiled=runtime.compile)
    return Roofline(
        gpu=cluster.slowest_kind,
        dtype=runtime.activation_dtype,
        tf32=runtime.compute_dtype == TF32,
        low=recipe_of(runtime),
        attention_kernel=attention_kernel(runtime, cluster.slowest_kind.architecture, documents=documents, sinks=sinks),
        window_kernel=spec.window_kernel,
        windowed=windowed,
        measured=calibration,
        runtime=spec.measured_as,
        kernel_factor=costs.kernel_factor,
        layer_factor=costs.layer_factor,
    )
