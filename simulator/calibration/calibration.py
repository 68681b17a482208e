"""What measurements of one machine answer when plans are costed: operators, collectives, overlap, contention, runtimes.

A `Calibration` is made once, from a profile, where a program's inputs are read
(`simulator.fitting.calibration_fit.calibrated`). Everything that costs a plan is handed the calibration, or None where
nothing was measured; then every figure is what the datasheet and published efficiencies say.
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
from simulator.kernels.low_precision import recipe_of
from simulator.kernels.operators import Work
from simulator.kernels.roofline import DATASHEET, Roofline
from simulator.overlap.site_costs import SITE_MODES, SiteRates
from simulator.runtimes.library import RuntimeSpec, attention_kernel, runtime_spec
from simulator.runtimes.parts import HostSpec
from topology.cluster import Cluster, GpuKind

# Host costs that only runtimes have whose operators go through Python one by one.
OF_DTENSORS = frozenset({"tp_layer_s", "selective_s"})
LOADING = frozenset({"data_token_s", "data_spread"})
NOTHING = 1e-12  # what is left of an effect that is not counted: a rate stays a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """What a collective and compute cost each other while both run: each takes so many times as long."""

    compute: float = 1.0
    collective: float = 1.0
    samples: int = 0

    @property
    def lost(self) -> float:
        """Return seconds of compute lost for each second that the collective would take alone."""
        return self.collective * (1.0 - 1.0 / self.compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Which effects are counted; leaving one out shows what it is worth (tests/bench/calibration_tables.py).

    Without `operators` kernels take what the datasheet says; without `sustained` they run at the clocks of a GPU that
    has rested; the others are left out altogether.
    """

    operators: bool = True
    host: bool = True
    contention: bool = True
    packing: bool = True
    sustained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What decides how long kernels of layers and head take: widths, words, tokens of a micro batch, and who shares
    them.
    """

    hidden: int
    ffn: int
    vocab: int
    tokens: int
    tp: int
    cp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCosts:
    """What runs of one and two layers said of a runtime, eager or compiled; see simulator.fitting.runtime_fit.

    `kernel_factor` multiplies kernel times: inside a step clocks, caches and gaps are not those of a kernel alone;
    `layer_factor` those of layers once more, whose many short kernels have more of all three than a head's few;
    `of_shapes` has the two for layers that were run themselves. `host` are fields of HostSpec that replace the
    description's. `collective_factor` multiplies the times of collectives, `network_factor` once more those between
    nodes, to which each crossing adds `crossing_s` (`CollectiveModel`); `reserved` is what memory was over what is
    described, `activations` once more what of it is no state; `flush_s` what a micro batch takes more where the
    allocator has to give memory back, None where that is as described. `borrowed`: of the runtime that the one in
    question is like. `host_speed`: how many times as long the host takes as those that descriptions tell of.
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
    spread: float = 0.0  # of the runs around the fit
    runs: int = 0
    borrowed: bool = False
    host_speed: float = 1.0

    def factors(self, shape: LayerShape) -> tuple[float, float]:
        """Return the factor of kernels and that of layers over it, for layers of a shape."""
        return self.of_shapes.get(shape, (self.kernel_factor, self.layer_factor))

    def slower(self, factor: float) -> RuntimeCosts:
        """Return the costs with all kernels longer by a factor."""
        shapes = {shape: (factor * kernel, layer) for shape, (kernel, layer) in self.of_shapes.items()}
        return replace(self, kernel_factor=factor * self.kernel_factor, of_shapes=shapes)

    def held_bytes(self, described: Floats | float, state: Floats | float) -> Floats:
        """Return the bytes that are held where so many are described, of them `state` parameters, gradients and
        optimizer.
        """
        if self.activations == 1.0:
            return np.asarray(self.reserved * described)
        kept = np.minimum(state, described)
        return np.asarray(self.reserved * (kept + self.activations * (described - kept)))

    def described_bytes(self, held: float, state: float) -> float:
        """Return how many bytes are described where so many are held."""
        over = held / self.reserved - state
        return state + over / self.activations if over > 0 else held / self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What one machine showed. Parts that were not measured are empty, and answer as the datasheet does.

    `contention` is by collective, `runtimes` by (runtime, compiled); `burst` is a large product's time after a rest
    over its time on a GPU at work. `gpu_measured`: more than collectives is known. `profile` is the fingerprint of the
    profile that all of it is from; with `current` false it is of another driver or of long ago, and makes nothing
    surer.
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
    effects: Effects = field(default_factory=Effects)

    def runtime(self, name: str, *, compiled: bool) -> RuntimeCosts:
        """Return what is known of a runtime; neutral where nobody ran it.

        One that was not run is taken to cost what the runtime costs that it is like, but for Python that it does
        without.
        """
        spec = runtime_spec(name)
        own = self.runtimes.get((spec.names[0], compiled))
        if own is not None or not spec.like:
            return own or RuntimeCosts()
        found = self.runtimes.get((spec.like, compiled), RuntimeCosts())
        kept = {k: v for k, v in found.host.items() if not (spec.host.plain_tensors and k in OF_DTENSORS)}
        return replace(found, host=kept, borrowed=True)

    @property
    def host_speed(self) -> float:
        """How many times as long this host takes as those that descriptions tell of; 1 where no runtime showed it."""
        return next((costs.host_speed for costs in self.runtimes.values()), 1.0)

    def seconds(
        self, work: Work, datasheet: Callable[[], Floats], *, dtype: str, runtime: str
    ) -> tuple[Floats, Floats]:
        """Return (seconds, source) of a kernel, one value a row; `datasheet` gives what the datasheet says of it."""
        if not self.effects.operators:
            plain = datasheet()
            return plain, np.full(plain.shape, DATASHEET)
        return self.operators.seconds(work, datasheet, dtype=dtype, runtime=runtime)

    def packing_factor(self, nbytes: Floats | float, usual: float) -> Floats:
        """Return what FSDP's packing of modules of `nbytes` takes over what is counted for it; `usual` where not
        measured.
        """
        return self.operators.packing_factor(nbytes, usual) if self.effects.packing else np.full(1, NOTHING)

    def update_bytes_per_s(self, param_dtype: str) -> float | None:
        """Return the rate of clipping and updating, over the bytes counted for them; None where it was not measured."""
        return self.operators.update_bytes_per_s(param_dtype) if self.effects.operators else None

    def clocks(self, duty: Floats, exponent: float) -> Floats:
        """Return kernel times over those of a GPU that is never idle, for the share of a step that it is busy.

        A power limit holds on average: what idle moments save, busy ones may draw, and arithmetic goes with the
        `exponent`-th power of what it draws (efficiency.toml), up to the clocks that a rested GPU reaches.
        """
        if not self.effects.sustained:
            return np.full(duty.shape, self.burst)
        return np.maximum(np.asarray(duty) ** exponent, self.burst)

    def contention_of(self, *ops: str) -> Contention | None:
        """Return what compute and collectives cost each other, or None where that was not measured.

        `ops` are the collectives in question; their mean, or that of all where none of them was measured.
        """
        if not self.effects.contention:
            return Contention()
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
    """Return the collectives of `cluster`, with those that were measured before the model."""
    return CollectiveModel(cluster, measured=calibration.collectives if calibration is not None else None)


def overlap_of(calibration: Calibration | None) -> SiteRates:
    """Return the rates of the overlap modes; assumed ones where they were not measured."""
    return calibration.overlap if calibration is not None else SiteRates()


def overlap_assumed(tp_overlaps: Iterable[str], calibration: Calibration | None) -> tuple[str, ...]:
    """Return what estimates of plans with these overlap modes assume, in words; nothing where it was measured."""
    ours = sorted({mode for text in tp_overlaps for mode in modes_in(text) if mode in SITE_MODES})
    if not ours or overlap_of(calibration).source != "assumed":
        return ()
    return (f"overlap {', '.join(ours)} as measured on H200s (planner calibrate measures it here)",)


def calibrated_host(spec: RuntimeSpec, calibration: Calibration | None, *, compiled: bool) -> RuntimeSpec:
    """Return a runtime's description with the host costs that its single layers showed."""
    if calibration is None:
        return spec
    if not calibration.effects.host:
        words = {"synchronizes", "plain_tensors", "norm_to_host", "selective_s"}
        numbers = [f.name for f in fields(spec.host) if f.name not in words]
        silent = dict.fromkeys(numbers, 0.0)
        return replace(spec, host=replace(spec.host, selective_s=None, **silent))  # type: ignore[arg-type]  # floats
    found = calibration.runtime(spec.names[0], compiled=compiled).host
    if "launch_s" not in found and calibration.host_speed != 1.0:
        found = scaled_host(spec.host, calibration.host_speed) | found
    return replace(spec, host=replace(spec.host, **found)) if found else spec  # type: ignore[arg-type]  # floats all


def scaled_host(described: HostSpec, speed: float) -> dict[str, float]:
    """Return the described host costs of a runtime that was not run, on a host that takes `speed` times as long.

    Loading data is left out, which runtimes time themselves.
    """
    costs = {field.name: getattr(described, field.name) for field in fields(described) if field.name not in LOADING}
    return {name: speed * value for name, value in costs.items() if isinstance(value, float)}


def roofline_of(
    cluster: Cluster, runtime: Runtime, spec: RuntimeSpec, calibration: Calibration | None, *, windowed: float = 0.0
) -> Roofline:
    """Return kernel times for a runtime on a cluster's slowest GPU.

    `windowed`: the share of attention's arithmetic in layers with a sliding window (`plan_table.windowed_share`).
    """
    costs = RuntimeCosts()
    if calibration is not None and calibration.effects.sustained:
        costs = calibration.runtime(spec.names[0], compiled=runtime.compile)
    return Roofline(
        gpu=cluster.slowest_kind,
        dtype=runtime.activation_dtype,
        tf32=runtime.compute_dtype == TF32,
        low=recipe_of(runtime),
        attention_kernel=attention_kernel(runtime, cluster.slowest_kind.architecture),
        window_kernel=spec.window_kernel,
        windowed=windowed,
        measured=calibration,
        runtime=spec.measured_as,
        kernel_factor=costs.kernel_factor,
        layer_factor=costs.layer_factor,
    )


def without(calibration: Calibration, **effects: bool) -> Calibration:
    """Return the calibration with some effects switched off."""
    return replace(calibration, effects=replace(calibration.effects, **effects))
