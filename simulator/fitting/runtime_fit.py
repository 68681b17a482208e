"""A runtime's own costs from runs of one and two layers of real models: host time, data, and kernels inside a step.

Narrow layers take the device almost no time, so their runs show the host (`simulator.fitting.host_fit`). Wide layers
show the device: kernel times inside a step over kernel times alone. What runs take besides layers is the step's own
work. The time of data loading is the runtime's own measurement. Full-depth runs are never used; profiles that have one
are refused (topology.profile.profile).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # submodules are imported when first used
from numpy.typing import NDArray

from simulator.analytical.estimates import EstimateTable, estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration, LayerShape, RuntimeCosts
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.verify import verify_lists, verify_model, verify_plan, verify_runtime, verify_workload
from simulator.config.workload import Workload
from simulator.fitting.host_fit import (
    LEAST_S,
    SINGLE,
    HostAlone,
    HostRuns,
    as_host_fields,
    fit_hosts,
    host_alone,
)
from simulator.runtimes.library import is_described, runtime_names, runtime_spec
from simulator.step.host import BATCH_TOKENS, costs_in, slowest
from topology import codec
from topology.catalog.platform import MAX_GPUS_PER_NODE, grow
from topology.cluster import Cluster
from topology.errors import BadPlan, PlannerError
from topology.profile.profile import Profile
from topology.profile.samples import LayerSample
from topology.rates.reach import reach

Floats = NDArray[np.float64]

# Predicted device time over measured step time: above the first, the device decided the run; below the second, the host
# did. Source: assumed.
DEVICE_BOUND = 0.7
HOST_BOUND = 0.35
FACTORS = (0.5, 2.0)  # range of kernel times inside a step over those alone; beyond it, the fit has found noise
KERNELS = ("compute", "recompute")  # parts of a step to which the factors apply
MOST_STEP_S = 10e-3
# Host costs of zero, with which a prediction has the device's time alone.
NO_HOST_COST = as_host_fields(dict.fromkeys(("launch_s", *SINGLE), 0.0)) | {"step_s": 0.0, "cut_step_s": 0.0}
NO_DATA = {"data_token_s": 0.0}
FEWEST = 3  # with fewer shapes of device-bound runs, factors stay near 1, by the following spreads
# Root mean squares over the nine fits with six or more runs of h200x1, h200x2_fresh, h200x2_next, h200x4, h200x4_draw1
# and h200x4_draw3 in examples/profiles: 0.035 of the mean factor, 0.057 of layers and others apart, and 0.62.
INSIDE_SPREAD = 0.05  # of the factor on kernel times inside a step
APART_SPREAD = 0.06  # of the factor of layers over that of other kernels
STEP_SPREAD = 0.6  # of the time for which the device waits within a step, over the described one
# Spread of the factor between shapes, and of a single run. Source: assumed.
SHAPE_SPREAD = 0.08
RUN_SPREAD = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A layer sample as the simulator's types. `seconds` is the step without data loading, which one rank has timed."""

    sample: LayerSample
    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime

    @property
    def seconds(self) -> float:
        spread = runtime_spec(self.runtime.name).host.data_spread
        waited = float(slowest(np.array([float(self.plan.gpus)]), spread)[0])
        return self.sample.step_s - waited * (self.sample.data_s or 0.0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """What the time of a layer's products depends on: width, feed-forward width, and tokens of a micro batch."""
        return self.model.hidden, self.model.ffn, self.plan.micro_batch_size * self.workload.seq_len

    @property
    def layer(self) -> LayerShape:
        hidden, ffn, tokens = self.shape
        vocab, plan = self.model.vocab, self.plan
        return LayerShape(hidden=hidden, ffn=ffn, vocab=vocab, tokens=tokens, tp=plan.tp, cp=plan.cp)

    @property
    def pair(self) -> str:
        """A key that is equal for runs that differ only in their number of layers."""
        return codec.fingerprint((replace(self.model, layers=1), self.plan, self.workload, self.runtime))


def fit_runtimes(profile: Profile, cluster: Cluster, calibration: Calibration) -> dict[tuple[str, bool], RuntimeCosts]:
    """Return the costs of every runtime that ran single layers, by (name, compiled).

    `calibration` has the GPU's kernels; collectives are modelled. A cluster of fewer GPUs is taken to be a part of the
    machine that was measured. Runs on more GPUs than are connected are not used; on a cluster of one GPU, runs on
    several do not count for kernels.
    """
    boost_hz = _boost_hz(profile)
    fits = [
        _Fit(runs, cluster, calibration, boost_hz)
        for key, found in _by_runtime(profile).items()
        if (runs := [run for run in found if is_connected(cluster, run.plan.gpus)])
    ]
    shown = [fit for fit in fits if fit.host_bound]
    alone = host_alone(profile.host)
    hosts = fit_hosts([fit.host_runs() for fit in shown], alone)
    costs = {fit.key: found for fit, found in zip(shown, hosts.costs, strict=True)}
    fitted = {fit.key: fit.costs(costs.get(fit.key, {}), hosts.speed) for fit in fits}
    return fitted if alone is None else _not_run(alone, hosts.speed) | fitted


def _not_run(alone: HostAlone, speed: float) -> dict[tuple[str, bool], RuntimeCosts]:
    """Return the costs, from the CPU alone, of runtimes without runs of layers: runtimes that compute on DTensors have
    the measured costs of those, all others the speed of the host.
    """
    described = [runtime_spec(name) for name in dict.fromkeys(runtime_spec(name).names[0] for name in runtime_names())]
    return {
        (spec.names[0], compiled): RuntimeCosts(host=alone.costs(spec.host), host_speed=speed)
        for spec in described
        if not spec.like
        for compiled in (False, True)
    }


def is_connected(cluster: Cluster, gpus: int) -> bool:
    """Return whether `gpus` GPUs like those of `cluster` are connected; a cluster may be extended to a full node."""
    if gpus > max(cluster.gpu_count, MAX_GPUS_PER_NODE):
        return False
    return gpus == 1 or reach(grow(cluster, gpus)).gpus >= gpus


def _boost_hz(profile: Profile) -> float:
    """Return the clock at which products were measured on a rested GPU; 0 where none was read."""
    clocks = (sample.conditions.sm_clock_hz or 0.0 for sample in profile.operators if sample.regime == "burst")
    return max(clocks, default=0.0)


def _by_runtime(profile: Profile) -> dict[tuple[str, bool], list[Run]]:
    groups: dict[tuple[str, bool], list[Run]] = {}
    for sample in profile.layers:
        run = None if sample.invalid else run_of(sample)
        if run is not None:
            groups.setdefault((runtime_spec(run.runtime.name).names[0], run.runtime.compile), []).append(run)
    return groups


def run_of(sample: LayerSample) -> Run | None:
    """Return the run of a sample; None for a runtime or mode that the descriptions do not have.

    Raises UserError where numbers of its model, plan, workload or runtime are impossible.
    """
    run = _decoded_run(sample)
    if run is None:
        return None
    verify_model(run.model, where="layers")
    verify_plan(run.plan, where="layers")
    verify_lists(run.plan, where="layers", layers=run.model.layers, gpus=run.plan.gpus)
    verify_workload(run.workload, where="layers")
    verify_runtime(run.runtime, where="layers")
    if (stages := run.plan.stages) > run.model.layers:
        raise BadPlan(f"layers: the plan has {stages} stages", why=f"the model has {run.model.layers} layers")
    return None if run.runtime.not_modelled or run.seconds <= 0 else run


def _decoded_run(sample: LayerSample) -> Run | None:
    try:
        runtime = codec.convert(sample.runtime, Runtime, where="layers.runtime")
        if not is_described(runtime.name):
            return None
        plan = codec.convert(sample.plan, Plan, where="layers.plan")
        if plan.recompute not in runtime_spec(runtime.name).recompute:
            return None
        return Run(
            sample=sample,
            model=codec.convert(sample.model, Model, where="layers.model"),
            plan=plan,
            workload=codec.convert(sample.workload, Workload, where="layers.workload"),
            runtime=replace(runtime, logs_each_step=True),  # samples are of single steps
        )
    except PlannerError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """Seconds of a device-bound run: kernels of layers and other kernels at full clocks, packing, and the rest, to
    which no factor applies.
    """

    measured_s: float
    layers_s: float
    others_s: float
    copies_s: float
    rest_s: float
    at_clock: float  # kernel time at the run's mean clock over that at full load; 1 if unknown
    slower: float  # kernel time at the clocks allowed by this run's kernels and pauses, over that of products alone

    @property
    def left_s(self) -> float:
        """Seconds to be explained by the factors and the step's own time."""
        return self.measured_s - self.rest_s

    @property
    def row(self) -> Floats:
        """The coefficients of (factor of layers, factor of others, step's own seconds).

        In runs too short for its power limiter, too, a GPU is faster than under full load.
        """
        slower = min(self.slower, self.at_clock)
        return np.array([slower * self.layers_s, slower * self.others_s + self.copies_s, 1.0])


def _solve_factors(
    matrix: Floats, left: Floats, *, shapes: int, layers_apart: bool, usual_s: float, most_s: float
) -> Floats:
    """Return (factor of layers, factor of others, step's own seconds), by least squares; the last is bounded.

    Layers and others get one common factor where no pair of runs separates them, or where heads are so small that noise
    would decide theirs. With fewer than `FEWEST` shapes both are pulled towards 1 and towards each other, since one
    shape says little about others.
    """
    if shapes < FEWEST:
        usual = np.array([[0.5, 0.5, 0.0], [1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
        weights = SHAPE_SPREAD / np.array([INSIDE_SPREAD, APART_SPREAD, STEP_SPREAD * max(usual_s, LEAST_S)])
        rows = np.vstack([matrix, weights[:, None] * usual])
        return _least_squares(rows, np.append(left, weights * np.array([1.0, 0.0, usual_s])), most_s)
    if layers_apart:
        found = _least_squares(matrix, left, most_s)
        if FACTORS[0] <= found[:2].min() and found[:2].max() <= FACTORS[1]:
            return found
    together = np.stack([matrix[:, 0] + matrix[:, 1], matrix[:, 2]], axis=1)
    factor, step_s = _least_squares(together, left, most_s)
    return np.array([factor, factor, step_s])


def _own_factors(matrix: Floats, left: Floats, common: Floats) -> Floats:
    """Return (factor of layers, factor of others) of one shape, fitted to its runs and to the `common` factors, from
    which shapes differ by `SHAPE_SPREAD`.
    """
    weight = RUN_SPREAD / SHAPE_SPREAD
    rows = np.vstack([matrix[:, :2], weight * np.eye(2)])
    found = scipy.linalg.lstsq(rows, np.append(left - matrix[:, 2] * common[2], weight * common[:2]))[0]
    return np.asarray(np.clip(found, *FACTORS))


def _least_squares(matrix: Floats, left: Floats, most_s: float) -> Floats:
    low, high = np.full(matrix.shape[1], -np.inf), np.full(matrix.shape[1], np.inf)
    low[-1], high[-1] = 0.0, max(most_s, LEAST_S)
    return np.asarray(scipy.optimize.lsq_linear(matrix, left, bounds=(low, high)).x)


class _Fit:
    """The fit of one runtime, eager or compiled."""

    def __init__(self, runs: list[Run], cluster: Cluster, calibration: Calibration, boost_hz: float) -> None:
        self.runs, self.cluster, self.calibration, self.boost_hz = runs, cluster, calibration, boost_hz
        self.key = (runtime_spec(runs[0].runtime.name).names[0], runs[0].runtime.compile)
        self._parts: dict[tuple[object, ...], dict[str, float]] = {}
        self.host_bound, self.device_bound = [], []
        for run, parts in zip(runs, self._alone(runs), strict=True):
            share = sum(parts.values()) / run.seconds
            if share < HOST_BOUND:
                self.host_bound.append(run)
            elif share > DEVICE_BOUND and (cluster.gpu_count > 1 or run.plan.gpus == 1):
                self.device_bound.append(run)

    def costs(self, host: dict[str, float], speed: float) -> RuntimeCosts:
        """Return the costs from all runs, with the host's costs and speed as `fit_hosts` found them."""
        shown = frozenset[str]().union(*self.host_runs().occurring)
        return replace(self._device_costs(self._data() | host), host_speed=speed, shown=shown)

    # --- the host -----------------------------------------------------------------------------------------------

    def _data(self) -> dict[str, float]:
        """Return host seconds per token loaded, as the runtime timed its loading; runs of any length count."""
        rates = [run.sample.data_s / _loaded_tokens(run) for run in self.runs if run.sample.data_s is not None]
        return {"data_token_s": float(np.median(rates))} if rates else {}

    def host_runs(self) -> HostRuns:
        """Return the runs that wait for their host, as input of `fit_hosts`."""
        described = runtime_spec(self.key[0]).host
        return HostRuns(
            # Only wide layers separate a step's work before its layers from that after them.
            described=replace(described, rest_s=described.rest_s + described.step_s),
            seconds=np.array([run.seconds for run in self.host_bound]),
            spreads=np.array([run.sample.spread for run in self.host_bound]),
            occurring=[costs_in(run.plan, sparse=run.model.moe is not None) for run in self.host_bound],
            predict=self._steps,
        )

    # --- the device ---------------------------------------------------------------------------------------------

    def _device_costs(self, host: dict[str, float]) -> RuntimeCosts:
        """Return the costs from device-bound runs: the factors of kernel times inside a step, and the step's own host
        work.

        Two runs with one and with two layers give two equations: their difference has the kernels of a layer only, the
        run with one layer also has embedding, head and loss. A run without its pair gives one equation. Least squares
        of relative errors finds a factor for kernels, a further factor for those of layers, and the step's own time.
        """
        if not self.device_bound:
            return RuntimeCosts(host=self._with_step(host, None), runs=len(self.runs))
        device = self._device(self.device_bound, host)
        place = {id(run): index for index, run in enumerate(self.device_bound)}
        pairs = [(place[id(a)], place[id(b)]) for a, b in _pairs(self.device_bound)]
        described = runtime_spec(self.key[0]).host
        most_s = min(MOST_STEP_S, host["rest_s"] + host["fsdp_rest_s"]) if "rest_s" in host else MOST_STEP_S
        rows = np.array([one.row for one in device])
        left = np.array([one.left_s for one in device])
        scale = np.array([one.measured_s for one in device])
        alone, noise = rows.copy(), np.full(len(scale), RUN_SPREAD)
        for one, two in pairs:
            noise[two] *= np.hypot(scale[one], scale[two]) / np.maximum(scale[two] - scale[one], LEAST_S)
            rows[two], left[two], scale[two] = rows[two] - rows[one], left[two] - left[one], scale[two] - scale[one]
        usable = scale > 0
        spread = scale * np.hypot(SHAPE_SPREAD, noise) / SHAPE_SPREAD  # of what a shape's runs say of other shapes
        answer = _solve_factors(
            rows[usable] / spread[usable, None],
            left[usable] / spread[usable],
            shapes=len({run.shape for run in self.device_bound}),
            layers_apart=bool(pairs),
            usual_s=described.step_s,
            most_s=most_s,
        )
        own = {
            shape: _own_factors(rows[of] / scale[of, None], left[of] / scale[of], answer)
            for shape in {run.layer for run in self.device_bound}
            if np.any(of := usable & [run.layer == shape for run in self.device_bound])
        }
        missed = [np.log((p + d.rest_s) / d.measured_s) for p, d in zip(alone @ answer, device, strict=True)]
        layers, others, step_s = (float(value) for value in answer)
        return RuntimeCosts(
            kernel_factor=others,
            layer_factor=layers / others,
            of_shapes={shape: (float(two), float(one / two)) for shape, (one, two) in own.items()},
            host=self._with_step(host, step_s),
            spread=float(np.median(np.abs(missed))),
            runs=len(self.runs),
        )

    def _with_step(self, host: dict[str, float], step_s: float | None) -> dict[str, float]:
        """Return the host's costs with the time that the device waits for moved out of `rest_s`, and out of what is
        added to it for ranks that share the work.

        That time is `step_s` of device-bound runs or, without any, its described share.
        """
        if "rest_s" not in host:
            return host if step_s is None else {**host, "step_s": step_s}
        described, whole = runtime_spec(self.key[0]).host, host["rest_s"]
        share = described.step_s / max(described.step_s + described.rest_s, 1e-9)
        waits = whole * share if step_s is None else step_s
        alone = min(waits, whole)
        together = {name: max(host[name] - (waits - alone), 0.0) for name in ("fsdp_rest_s", "tp_rest_s", "cp_rest_s")}
        return {**host, **together, "step_s": alone, "cut_step_s": waits - alone, "rest_s": whole - alone}

    def _device(self, runs: Sequence[Run], host: dict[str, float]) -> list[_Device]:
        """Return the device's parts of runs, with layers apart from the other kernels."""
        deeper = [replace(run, model=replace(run.model, layers=run.model.layers + 1)) for run in runs]
        paused = self._estimates(runs, [host] * len(runs), pauses=True)
        found = []
        for run, part, more, (table, row) in zip(runs, self._alone(runs), self._alone(deeper), paused, strict=True):
            arithmetic = sum(part[name] for name in KERNELS)
            layer = sum(more[name] - part[name] for name in KERNELS)
            inside = min(run.model.layers * layer, arithmetic)
            counted = (*KERNELS, "copies", "host")
            clock_hz, burst = run.sample.conditions.mean_sm_clock_hz if self.boost_hz else None, self.calibration.burst
            found.append(
                _Device(
                    measured_s=run.seconds,
                    layers_s=inside,
                    others_s=arithmetic - inside,
                    copies_s=part["copies"],
                    rest_s=sum(seconds for name, seconds in part.items() if name not in counted),
                    at_clock=max(burst, burst * self.boost_hz / clock_hz) if clock_hz else 1.0,
                    slower=float(table.clocks[row]),
                )
            )
        return found

    def _alone(self, runs: Sequence[Run]) -> list[dict[str, float]]:
        """Return the parts of steps at full clocks with a host that costs nothing: device time only.

        A run with one layer more is often another run, which is estimated once.
        """
        keys = [(run.model, run.plan, run.workload, run.runtime, run.sample.data_s is None) for run in runs]
        new = {key: run for key, run in zip(keys, runs, strict=True) if key not in self._parts}
        estimates = self._estimates(list(new.values()), [NO_HOST_COST] * len(new))
        for key, (table, row) in zip(new, estimates, strict=True):
            self._parts[key] = {name: float(seconds[row]) for name, seconds in table.breakdown_s.items()}
        return [self._parts[key] for key in keys]

    def _steps(self, places: Sequence[int], hosts: Sequence[dict[str, float]]) -> Floats:
        """Return the steps of host-bound runs in seconds, each with a host of its own."""
        runs = [self.host_bound[place] for place in places]
        estimates = self._estimates(runs, [{"step_s": 0.0, "cut_step_s": 0.0, **host} for host in hosts])
        return np.array([table.step_s[row] for table, row in estimates])

    def _estimates(
        self, runs: Sequence[Run], hosts: Sequence[dict[str, float]], *, pauses: bool = False
    ) -> list[tuple[EstimateTable, int]]:
        """Return a table for every run, and its row there: runs of one model and workload are estimated at once.

        They are at the clocks of a GPU that is never idle and without data loading where it was timed; with `pauses`,
        with data loading and at the clocks that idle time allows.
        """
        alike: dict[tuple[object, ...], list[int]] = {}
        for place, run in enumerate(runs):
            alike.setdefault((run.model, run.workload, run.runtime, run.sample.data_s is None), []).append(place)
        found: dict[int, tuple[EstimateTable, int]] = {}
        for places in alike.values():
            first = runs[places[0]]
            loading = NO_DATA if first.sample.data_s is not None and not pauses else {}
            burst = self.calibration.burst if pauses else 1.0
            costs = [{self.key: RuntimeCosts(host=hosts[place] | loading)} for place in places]
            known = [replace(self.calibration, runtimes=one, burst=burst) for one in costs]
            scenario = Scenario(
                model=first.model,
                # Layers were run on the profile's machine, of which these plans may use a part.
                cluster=grow(self.cluster, max(runs[place].plan.gpus for place in places)),
                workload=first.workload,
                runtime=first.runtime,
                calibration=known[0],
            )
            own = known if any(one != costs[0] for one in costs) else ()
            table = estimate_plans(scenario, [runs[place].plan for place in places], each_with=own)
            found |= {place: (table, row) for row, place in enumerate(places)}
        return [found[place] for place in range(len(runs))]


def _pairs(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Return pairs of runs with one and two layers, otherwise equal."""
    by_pair: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_pair.setdefault(run.pair, {})[run.model.layers] = run
    return [(found[1], found[2]) for found in by_pair.values() if len(found) == 2]


def _loaded_tokens(run: Run) -> float:
    mine = run.workload.global_batch_size / run.plan.data_parallel
    return run.workload.seq_len * mine + BATCH_TOKENS * (1.0 if run.plan.pp > 1 else mine / run.plan.micro_batch_size)
