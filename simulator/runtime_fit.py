"""A runtime's own costs from runs of one and two layers of real models: host time, data, and kernels inside a step.

Three things are told apart by what decides a run. Narrow layers, of which the device makes nothing, show the host: the
second layer is what a layer's launches, gathers and hooks cost, and features (sharding, tensor parallelism,
recomputation) are what they add to a plain one. Wide layers show the device: kernel times inside a step over kernel times
alone. What both have in common beyond layers is the step's own work. A run's data loading is what the runtime itself
said of it.

Full-depth runs are never looked at; profiles that hold one are refused (topology.profile).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simulator.calibration import Calibration, RuntimeCosts
from simulator.model import Model
from simulator.plan import Plan
from simulator.roofline import efficiency
from simulator.runtime import Runtime
from simulator.runtime_library import runtime_names, runtime_spec
from simulator.workload import Workload
from topology import codec
from topology.errors import PlannerError
from topology.platform import grow

if TYPE_CHECKING:
    from simulator.closed_form import EstimateTable
    from topology.cluster import Cluster
    from topology.profile import Profile
    from topology.samples import LayerSample

Floats = NDArray[np.float64]

DEVICE_BOUND = 0.7  # predicted device time over measured, above which the device decided the run
HOST_BOUND = 0.35  # and below which the host did
ROUNDS = 3
STEP_RANGE_S = (0.0, 10e-3)
# Costs of the host that a fit starts from: none, so that what is predicted is the device alone.
SILENT = {
    "launch_s": 0.0,
    "backward_launch_s": 0.0,
    "dtensor_launch_s": 0.0,
    "collective_s": 0.0,
    "forward_layer_s": 0.0,
    "backward_layer_s": 0.0,
    "checkpoint_s": 0.0,
    "step_s": 0.0,
}
COUNTING = SILENT | {"launch_s": 1.0, "backward_launch_s": 1.0, "dtensor_launch_s": 1.0}
# What a kind of parallelism adds to a layer's host time, as fields of HostSpec.
PARALLEL = (("fsdp", "fsdp_layer_s"), ("ddp", "ddp_layer_s"), ("tp", "tp_layer_s"), ("cp", "cp_layer_s"))
# How much of that is waiting: in runs of one and two layers no host gets ahead, ranks meet in every collective, and each
# waits for the latest launch of all; over many layers that evens out. Source: 40 layers of tensor parallelism over two
# H200s that waited for their hosts took 12.7 to 14.4 ms each, where single ones say 17.4 (examples/validation).
WAITING_SHARE = 0.25
FEWEST = 3  # wide runs below which nothing is said of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A layer sample as the simulator's types. `seconds` is the step without its data."""

    sample: LayerSample
    model: Model
    plan: Plan
    workload: Workload
    runtime: Runtime

    @property
    def seconds(self) -> float:
        return self.sample.step_s - (self.sample.data_s or 0.0)

    @property
    def pair(self) -> str:
        """The same for runs that differ in their number of layers alone."""
        return codec.fingerprint((replace(self.model, layers=1), self.plan, self.workload, self.runtime))


def fit_runtime(profile: Profile, cluster: Cluster, calibration: Calibration, key: tuple[str, bool]) -> RuntimeCosts:
    """Return the costs of one runtime, `key` being (name, compiled); neutral ones where the profile has no layers of it."""
    runs = _by_runtime(profile).get(key)
    return _Fit(runs, cluster, calibration).costs() if runs else RuntimeCosts()


def _by_runtime(profile: Profile) -> dict[tuple[str, bool], list[Run]]:
    groups: dict[tuple[str, bool], list[Run]] = {}
    for sample in profile.layers:
        run = None if sample.invalid else run_of(sample)
        if run is not None:
            groups.setdefault((runtime_spec(run.runtime.name).names[0], run.runtime.compile), []).append(run)
    return groups


def run_of(sample: LayerSample) -> Run | None:
    """Return the run of a sample; None for one that this version's descriptions do not know."""
    try:
        runtime = codec.convert(sample.runtime, Runtime, where="layers.runtime")
        if runtime.name not in runtime_names():
            return None
        plan = codec.convert(sample.plan, Plan, where="layers.plan")
        if plan.recompute not in runtime_spec(runtime.name).recompute:
            return None
        return Run(
            sample=sample,
            model=codec.convert(sample.model, Model, where="layers.model"),
            plan=plan,
            workload=codec.convert(sample.workload, Workload, where="layers.workload"),
            runtime=runtime,
        )
    except PlannerError:
        return None


class _Fit:
    """The fit of one runtime, eager or compiled."""

    def __init__(self, runs: list[Run], cluster: Cluster, calibration: Calibration) -> None:
        self.runs, self.cluster, self.calibration = runs, cluster, calibration
        self.key = (runtime_spec(runs[0].runtime.name).names[0], runs[0].runtime.compile)

    def costs(self) -> RuntimeCosts:
        # At full clocks, and with a host that costs nothing: what is left is the device.
        silent = {id(run): self._estimate(run, SILENT).breakdown_s for run in self.runs}
        narrow, wide = [], []
        for run in self.runs:
            share = sum(float(part[0]) for name, part in silent[id(run)].items() if name != "host") / run.seconds
            if share < HOST_BOUND:
                narrow.append(run)
            elif share > DEVICE_BOUND:
                wide.append(run)
        host = self._data() | self._host(narrow)
        return self._busy(wide, [silent[id(run)] for run in wide], host)

    # --- the host -----------------------------------------------------------------------------------------------

    def _data(self) -> dict[str, float]:
        """Return host seconds per token loaded, as the runtime itself timed its loading."""
        rates = [
            run.sample.data_s / (run.workload.seq_len * run.workload.global_batch_size / run.plan.data_parallel)
            for run in self.runs
            if run.sample.data_s is not None and run.workload.seq_len >= 2048
        ]
        return {"data_token_s": float(np.median(rates))} if rates else {}

    def _host(self, narrow: list[Run]) -> dict[str, float]:
        """Return the fields of HostSpec that second layers show; empty without a plain narrow pair.

        A second layer takes as long as the slower of host and device: the least over runs of one kind, wide ones
        included, is the host's, and noise can only lengthen it.
        """
        each: dict[str, float] = {}
        example: dict[str, Run] = {}
        rest: list[float] = []
        least = {id(run) for run in narrow}
        for one, two in _pairs(self.runs):
            kind = feature(one)
            took = max(two.seconds - one.seconds, 0.0)
            each[kind] = min(each.get(kind, took), took)
            if id(one) in least:
                example[kind] = one
                rest.append(max(one.seconds - took, 0.0))
        counts = {kind: self._launches(run) for kind, run in example.items()}
        if not counts.get("plain"):
            return {}
        launch_s = each["plain"] / counts["plain"]
        found = {
            "forward_layer_s": 0.0,
            "backward_layer_s": 0.0,
            "checkpoint_s": 0.0,
            "launch_s": launch_s,
            "backward_launch_s": launch_s,
            "dtensor_launch_s": launch_s,
            "rest_s": float(np.median(rest)),
        }
        for kind, field in PARALLEL:
            if kind in counts:
                found[field] = (1 - WAITING_SHARE) * max(each[kind] - counts[kind] * launch_s, 0.0)
        if "cp" in counts:  # ranks that share a sequence share parameters too
            found["cp_layer_s"] = max(found["cp_layer_s"] - found.get("fsdp_layer_s", 0.0), 0.0)
        for word, field in (("full", "checkpoint_s"), ("selective-op", "selective_s")):
            more = [
                each[f"{base} {word}"] - each[base] - max(counts[f"{base} {word}"] - counts[base], 0.0) * launch_s
                for base in ("plain", "fsdp")
                if base in counts and f"{base} {word}" in counts
            ]
            if more:
                found[field] = max(float(np.mean(more)), 0.0)
        return found

    def _launches(self, run: Run) -> float:
        """Return how many operators the host issues for one layer of a run, forward and backward."""
        one, two = (
            self._estimate(replace(run, model=replace(run.model, layers=layers)), COUNTING).breakdown_s["host"][0]
            for layers in (1, 2)
        )
        return float(two - one)

    # --- the device ---------------------------------------------------------------------------------------------

    def _busy(self, wide: list[Run], parts: list[dict[str, Floats]], host: dict[str, float]) -> RuntimeCosts:
        """Return how much longer kernels take inside a step, and the step's own host work, from wide layers.

        Both are solved for together, least squares of relative errors; a run is one equation. Clocks depend on how
        much of a step is idle, and so on the answer: a few rounds settle it.
        """
        if len(wide) < FEWEST:
            return RuntimeCosts(host=host, runs=len(self.runs))
        measured = np.array([run.seconds for run in wide])
        loaded = np.array([_loaded_s(run, host) for run in wide])

        def total(*names: str) -> Floats:
            return np.array([sum(float(part[name][0]) for name in names) for part in parts])

        arithmetic, moving = total("compute", "recompute"), total("copies", "contention", "optimizer")
        rest = total("exposed_communication", "bubble")
        exponent = efficiency(self.cluster.slowest_kind.architecture).power_exponent
        factor, step_s = 1.0, 1e-3
        for _ in range(ROUNDS):
            kernels = self._kernels(arithmetic, moving, factor, rest, step_s + loaded, exponent)
            # measured = kernels * factor + step + rest, each row over `measured`
            matrix = np.stack([kernels / measured, 1.0 / measured], axis=1)
            (factor, step_s), *_ = np.linalg.lstsq(matrix, 1.0 - rest / measured, rcond=None)
            if not STEP_RANGE_S[0] <= step_s <= STEP_RANGE_S[1]:
                step_s = float(np.clip(step_s, *STEP_RANGE_S))
                factor = float(np.median((measured - rest - step_s) / kernels))
        predicted = factor * self._kernels(arithmetic, moving, factor, rest, step_s + loaded, exponent) + rest + step_s
        found = {**host, "step_s": float(step_s)}
        if "rest_s" in found:
            found["rest_s"] = max(found["rest_s"] - float(step_s), 0.0)
        return RuntimeCosts(
            busy=float(factor),
            host=found,
            spread=float(np.median(np.abs(np.log(predicted / measured)))),
            runs=len(self.runs),
        )

    def _kernels(
        self, arithmetic: Floats, moving: Floats, factor: float, rest: Floats, idle: Floats, exponent: float
    ) -> Floats:
        """Return kernel seconds before `factor`, at the clocks that the idle part of each run leaves."""
        busy = factor * (arithmetic + moving) + rest
        return np.asarray(arithmetic * self.calibration.clocks(busy / (busy + idle), exponent) + moving)

    def _estimate(self, run: Run, host: dict[str, float]) -> EstimateTable:
        from simulator.closed_form import estimate_plans  # noqa: PLC0415 - it asks for calibrations itself

        calibration = replace(self.calibration, costs={self.key: RuntimeCosts(host=host)}, fit=None, burst=1.0)
        # Layers were run on the machine of the profile, of which the plans in question may have a part.
        machine = grow(self.cluster, run.plan.gpus)
        return estimate_plans(run.model, machine, run.workload, [run.plan], run.runtime, None, calibration=calibration)


def feature(run: Run) -> str:
    """Return what makes a narrow run's layer more than a plain one."""
    plan = run.plan
    if plan.tp > 1:
        kind = "tp"
    elif plan.cp > 1:
        kind = "cp"
    elif plan.dp_shard > 1:
        kind = "fsdp"
    else:
        kind = "ddp" if plan.dp_replicate > 1 else "plain"
    return kind if plan.recompute == "none" else f"{kind} {plan.recompute}"


def _pairs(runs: Iterable[Run]) -> list[tuple[Run, Run]]:
    """Return (one layer, two layers) of the same model and plan."""
    by_pair: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_pair.setdefault(run.pair, {})[run.model.layers] = run
    return [(found[1], found[2]) for found in by_pair.values() if len(found) == 2]


def _loaded_s(run: Run, host: dict[str, float]) -> float:
    tokens = run.workload.seq_len * run.workload.global_batch_size / run.plan.data_parallel
    return host.get("data_token_s", 0.0) * tokens
