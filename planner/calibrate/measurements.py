"""Possible measurements for given steps: layers, operators, collectives, contention and overlap, each with the terms
that it shows.

A measurement is one job of the executor. Its seconds are estimated from runs on four H200 (per sample, with processes
running); they are used for the order and shown to the user.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from planner.calibrate.calibration_request import (
    CONTENTION,
    Request,
    collective_item,
    copies,
    missing_from,
    plan_operators,
    unique,
)
from planner.calibrate.choose import Floats, Measurement
from planner.calibrate.layer_runs import layer_request, narrow_requests, runs_here
from planner.calibrate.planned_step import PlannedStep
from planner.calibrate.terms import Term, collective_term, effects
from planner.io.plan_words import plan_in_words
from simulator.analytical.estimates import estimate_plans
from simulator.analytical.scenario import Scenario
from simulator.calibration.calibration import Calibration
from simulator.calibration.items import CollectiveItem, ContentionItem, LayerItem, OperatorItem, OverlapItem
from simulator.calibration.kernel_samples import UPDATES
from simulator.config.model import Model
from simulator.config.plan import Plan
from simulator.config.workload import Workload
from simulator.fitting.runtime_fit import DEVICE_BOUND, HOST_BOUND
from simulator.kernels.roofline import PACKING
from simulator.lowering.training import lower_training
from simulator.program.program import Collective, Send
from simulator.runtimes.library import runtime_spec
from topology import codec
from topology.catalog.platform import grow
from topology.cluster import Cluster
from topology.errors import PlannerError
from topology.profile.profile import Profile

# Noise of logarithms: of a wide and of a narrow layer (simulator.fitting.host_fit), of kernels, and of collectives.
WIDE_NOISE, NARROW_NOISE, KERNEL_NOISE, COLLECTIVE_NOISE, PAIR_NOISE = 0.03, 0.07, 0.02, 0.03, 0.1
# Seconds to build a model, with or without torchtitan's trainer; to compile it if cached; per operator that moves
# memory, per size of a collective, per pair, per site in all modes.
BUILD_S = {True: 1.3, False: 0.5}
COMPILED_S, OPERATOR_S, SIZE_S, PAIR_S, SITE_S, JOB_S = 2.0, 0.22, 0.12, 2.0, 4.0, 0.5
LIMITED_S = 0.45  # of an operator at the power limit, which is counted once it has settled there
WARM_UP, WARM_S, STEPS, FEWEST_STEPS, TIMED_S = 3, 1.0, 40, 5, 1.0
OPERATORS_AT_ONCE = 24
SIZES_AT_MOST = 8
LONGEST_WIDE_S = 4.0  # longest predicted step of a wide layer
FEW_WORDS = 4096  # vocabulary of wide layers whose loss over all words does not fit
Messages = set[tuple[str, int, int]]  # collectives as (op, ranks, bytes)
KERNEL_TERMS = {"matmul": "matrix products", "attention": "attention", "move": "kernels that move memory"}


@dataclass(slots=True)
class PossibleMeasurements:
    """The distinct measurements for `steps` on `gpus` GPUs of `cluster`."""

    cluster: Cluster
    gpus: int
    terms: Sequence[Term]
    calibration: Calibration | None = None
    _place: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._place = {term.name: index for index, term in enumerate(self.terms)}

    def of(self, steps: Sequence[PlannedStep], sent: Sequence[Messages]) -> list[Measurement]:
        """Return the measurements without duplicates; `sent` has the collectives of each step."""
        narrow = unique(item for step in steps for item in narrow_requests(step, self.gpus))
        wide = unique(item for step in steps if (item := layer_request(step, self.gpus)) is not None)
        found = [*self.layers(narrow, narrow=True), *self.layers(wide, narrow=False), *self._operators(steps)]
        found.append(self.operators("copies of memory", copies().operators))
        if self.gpus > 1:
            found += [self.collective(item) for item in self._messages(sent)]
            found += [self.pair(item) for item in CONTENTION]
            overlapped = [step for step in steps if step.plan.tp_overlap != "none" and runs_here(step.runtime)]
            found += [self.site(item) for item in plan_sites(overlapped, self.gpus)]
        return found

    # --- layers -----------------------------------------------------------------------------------------------------

    def layers(self, items: Sequence[LayerItem], *, narrow: bool) -> Iterator[Measurement]:
        """Yield runs of one and two layers, except those that cannot be predicted or take long."""
        alike: dict[str, list[LayerItem]] = {}
        for item in items:
            parts = (item.model, item.workload, item.runtime, item.counts)
            alike.setdefault(codec.fingerprint(parts), []).append(item)
        for some in alike.values():
            yield from self._layers_alike(some, narrow=narrow)

    def _layers_alike(self, items: Sequence[LayerItem], *, narrow: bool) -> Iterator[Measurement]:
        """Yield runs of one model under several plans; a run that does not fit gets a smaller vocabulary."""
        model, runtime, counts = items[0].model, items[0].runtime, items[0].counts
        plans = [item.plan for item in items]
        scenario = Scenario(
            model=replace(model, layers=max(counts)),
            cluster=grow(self.cluster, max(2, *(plan.gpus for plan in plans))),
            workload=items[0].workload,
            runtime=runtime,
            calibration=self.calibration,
        )
        try:
            seen, table = effects(scenario, plans, self.terms, hosts_alone=narrow)
        except PlannerError:
            return
        for row, (item, plan) in enumerate(zip(items, plans, strict=True)):
            step_s = float(table.step_s[row])
            if not table.fits[row] and model.vocab > FEW_WORDS:
                yield from self._layers_alike([replace(item, model=replace(model, vocab=FEW_WORDS))], narrow=narrow)
            if step_s > LONGEST_WIDE_S or not table.fits[row]:
                continue
            timed = max(WARM_UP * step_s, WARM_S) + min(max(FEWEST_STEPS * step_s, TIMED_S), STEPS * step_s)
            each = (
                BUILD_S[runtime_spec(runtime.name).tools.layers == "torchtitan"]
                + timed
                + (COMPILED_S if runtime.compile else 0.0)
            )
            what = f"layers of {runtime.name}{', compiled' if runtime.compile else ''}, {layers_in_words(plan)}"
            shape = f", width {model.hidden}, {_tokens(plan, scenario.workload)}"
            waiting = 1.0 if narrow else float(table.breakdown_s["host"][row]) / step_s
            yield Measurement(
                name=f"narrow {what}" if narrow else what + shape,
                request=Request(layers=(item,)),
                ranks=plan.gpus,
                seconds=JOB_S + len(counts) * each,
                seen=np.where(self._terms_shown(waiting), seen[row : row + 1], 0.0),
                noise=np.array([NARROW_NOISE if narrow else WIDE_NOISE]),
            )

    def _terms_shown(self, waiting: float) -> NDArray[np.bool_]:
        """Return the terms shown by a run of layers that waits for its host for this share of its time.

        The fit takes host costs from host-bound runs, and kernels from device-bound runs
        (`simulator.fitting.runtime_fit`).
        """
        hosts = np.array([term.host for term in self.terms], dtype=np.bool_)
        if waiting > 1 - HOST_BOUND:
            return hosts
        return ~hosts if waiting < 1 - DEVICE_BOUND else np.zeros(len(hosts), dtype=np.bool_)

    # --- parts of steps ---------------------------------------------------------------------------------------------

    def _operators(self, steps: Sequence[PlannedStep]) -> Iterator[Measurement]:
        """Yield jobs for the operators of a step that no earlier job has, in parts that several GPUs can share."""
        known: set[str] = set()
        for step in steps:
            items = [one for one in unique(plan_operators(step)) if codec.fingerprint(one) not in known]
            known |= {codec.fingerprint(one) for one in items}
            for start in range(0, len(items), OPERATORS_AT_ONCE):
                some = items[start : start + OPERATORS_AT_ONCE]
                what = f"{len(some)} operators of {layers_in_words(step.plan)}, {step.runtime.compute_dtype}"
                shape = f", width {step.model.hidden}, {_tokens(step.plan, step.workload)}"
                yield self.operators(what + shape, some)

    def operators(self, name: str, items: Sequence[OperatorItem]) -> Measurement:
        """Return operators on one GPU as one job."""
        return self._direct(
            name,
            Request(operators=tuple(items)),
            Counter(_term_of(one) for one in items),
            KERNEL_NOISE,
            ranks=1,
            seconds=JOB_S + sum(OPERATOR_S if one.kind == "move" else LIMITED_S for one in items),
        )

    def _messages(self, sent: Sequence[Messages]) -> list[CollectiveItem]:
        """Return the collectives of steps in groups of at most `gpus` GPUs."""
        sizes: dict[tuple[str, int], set[int]] = {}
        for some in sent:
            for op, ranks, nbytes in some:
                if ranks <= self.gpus:
                    sizes.setdefault((op, ranks), set()).add(nbytes)
        return [collective_item(op, ranks, _spread_out(sorted(found))) for (op, ranks), found in sizes.items()]

    def collective(self, item: CollectiveItem) -> Measurement:
        return self._direct(
            f"{collective_term(item.op)} of {item.ranks} GPUs, {len(item.sizes)} sizes",
            Request(collectives=(item,)),
            {collective_term(item.op): len(item.sizes)},
            COLLECTIVE_NOISE,
            ranks=item.ranks,
            seconds=JOB_S + SIZE_S * len(item.sizes),
        )

    def pair(self, item: ContentionItem) -> Measurement:
        """Return a kernel that runs at the same time as a collective of all GPUs."""
        return self._direct(
            f"{item.compute} of {_size(item.shape)} alongside {collective_term(item.op)[:-1]} of"
            f" {item.nbytes / 1e6:.0f} MB",
            Request(contention=(item,)),
            {"kernels alongside collectives": 1},
            PAIR_NOISE,
            ranks=self.gpus,
            seconds=JOB_S + PAIR_S,
        )

    def site(self, item: OverlapItem) -> Measurement:
        """Return a tensor-parallel product with its collective in every overlap mode."""
        return self._direct(
            f"{item.operation.replace('_', ' ')} of {item.ranks} GPUs, {item.rows} x {sum(item.columns)} x"
            f" {item.depth}, in every mode",
            Request(overlap=(item,)),
            {"overlap of tensor parallelism": 1},
            PAIR_NOISE,
            ranks=item.ranks,
            seconds=JOB_S + SITE_S,
        )

    def _direct(
        self, name: str, request: Request, shown: Mapping[str, int], noise: float, *, ranks: int, seconds: float
    ) -> Measurement:
        """Return a measurement that shows terms separately; `shown` has the number of samples of each: few samples say
        little about other kernels of their kind.
        """
        places = {self._place[term]: count for term, count in shown.items() if term in self._place}
        seen = np.zeros((len(places), len(self.terms)))
        for row, place in enumerate(places):
            seen[row, place] = self.terms[place].spread
        scatter = [math.hypot(noise, self.terms[place].spread / math.sqrt(count)) for place, count in places.items()]
        return Measurement(name=name, request=request, ranks=ranks, seconds=seconds, seen=seen, noise=np.array(scatter))


def _term_of(operator: OperatorItem) -> str:
    """Return the term that a measured operator is part of."""
    if operator.name in UPDATES:
        return "clipping and updating"
    return "packing of FSDP" if operator.name in PACKING else KERNEL_TERMS[operator.kind]


def messages(step: PlannedStep, cluster: Cluster) -> Messages:
    """Return the collectives of a step as (op, ranks, bytes in nccl-tests' size column), each once.

    A few layers per stage and one micro batch per rank contain all of them.
    """
    plan = replace(step.plan, layers_per_stage=(), recompute_per_stage=())
    scenario = Scenario(
        model=shallow(step.model, 2 * plan.stages + 2),
        cluster=step.cluster or grow(cluster, plan.gpus),
        workload=replace(step.workload, global_batch_size=plan.data_parallel * plan.micro_batch_size * plan.pp),
        runtime=step.runtime,
    )
    try:
        lowered = lower_training(scenario, plan)
    except PlannerError:
        return set()
    found = set()
    for code in lowered.program.codes:
        for one in code.instructions:
            if isinstance(one, Collective) and one.group in lowered.costs.families:
                ranks = lowered.costs.families[one.group].ranks
                if ranks > 1:
                    found.add((one.op, ranks, int(one.nbytes)))
            elif isinstance(one, Send):
                found.add(("send_recv", 2, int(one.nbytes)))
    return found


def shallow(model: Model, layers: int) -> Model:
    """Return a model with `layers` such layers; with experts, after a dense layer if the model has dense ones."""
    fewer = replace(model, layers=layers, sliding_layers=min(model.windowed_layers, layers))
    if model.moe is None:
        return fewer
    dense = min(model.moe.dense_layers, 1)
    return replace(fewer, layers=layers + dense, moe=replace(model.moe, dense_layers=dense, dense_layer_ids=()))


def without_known(
    measurements: Sequence[Measurement], profile: Profile | None
) -> tuple[list[Measurement], list[Measurement]]:
    """Return (measurements of which the profile lacks a part, reduced to that part; those that it has completely)."""
    lacking, known = [], []
    for one in measurements:
        left = missing_from(one.request, profile)
        if left.empty:
            known.append(one)
        else:
            lacking.append(replace(one, request=left))
    return lacking, known


def job_of(one: Measurement) -> codec.JsonObject:
    """Return a measurement as the executor's job (`executor.calibrate.run`)."""
    (kind, items), *more = (
        (name, codec.to_builtins(getattr(one.request, name)))
        for name in ("operators", "layers", "collectives", "contention", "overlap")
        if getattr(one.request, name)
    )
    if more:
        raise ValueError(f"{one.name} asks for {kind} and more: a job is of one kind")
    return {"kind": kind, "name": one.name, "ranks": one.ranks, "seconds": one.seconds, "items": items}


def layers_in_words(plan: Plan) -> str:
    """Return the part of a plan that its layers depend on, as text."""
    return plan_in_words(plan, without={"micro_batch_size", "schedule"})


def _tokens(plan: Plan, workload: Workload) -> str:
    """Return the tokens of a micro batch as text."""
    sequences = "" if plan.micro_batch_size == 1 else f"{plan.micro_batch_size} x "
    return f"{sequences}{workload.seq_len} tokens"


def _size(shape: Mapping[str, int]) -> str:
    """Return the shape of a kernel as text: m x n x k of a product, or the bytes moved."""
    return f"{shape['bytes'] / 1e6:.0f} MB" if "bytes" in shape else " x ".join(map(str, shape.values()))


def _spread_out(sizes: Sequence[int]) -> list[int]:
    """Return at most SIZES_AT_MOST of ascending sizes, the ends among them."""
    if len(sizes) <= SIZES_AT_MOST:
        return list(sizes)
    return [sizes[round(place)] for place in np.linspace(0, len(sizes) - 1, SIZES_AT_MOST)]


def ops_of(sent: Sequence[Messages]) -> list[str]:
    """Return the names of the collectives, each once."""
    return sorted({op for some in sent for op, _, _ in some})


def own_effects(
    steps: Sequence[PlannedStep], cluster: Cluster, terms: Sequence[Term], known: Calibration | None
) -> tuple[Floats, Floats]:
    """Return (effects of the terms on each step, the steps in seconds); steps of one question are predicted together.

    Raises the errors of predicting them.
    """
    rows, seconds = np.zeros((len(steps), len(terms))), np.zeros(len(steps))
    groups: dict[str, list[int]] = {}
    for place, step in enumerate(steps):
        groups.setdefault(codec.fingerprint((step.model, step.workload, step.runtime, step.cluster)), []).append(place)
    for places in groups.values():
        first = steps[places[0]]
        scenario = Scenario(
            model=first.model,
            cluster=first.cluster or grow(cluster, max(steps[place].plan.gpus for place in places)),
            workload=first.workload,
            runtime=first.runtime,
            calibration=known,
        )
        plans = [steps[place].plan for place in places]
        rows[places], _ = effects(scenario, plans, terms)
        seconds[places] = estimate_plans(scenario, plans).step_s  # the same as in `planner estimate`
    return rows, seconds


# --- overlapped products ----------------------------------------------------------------------------------------------


GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"


def plan_sites(questions: Sequence[PlannedStep], gpus: int) -> tuple[OverlapItem, ...]:
    """Return the distinct sites of the plans of `questions` whose tensor parallelism fits on `gpus`."""
    return tuple(dict.fromkeys(one for question in questions for one in _plan_sites(question, gpus)))


def _plan_sites(question: PlannedStep, gpus: int) -> Iterator[OverlapItem]:
    plan, model = question.plan, question.model
    rows = plan.micro_batch_size * question.workload.seq_len // plan.cp
    divided = not (model.heads % plan.tp or model.kv_heads % plan.tp or model.ffn % plan.tp or rows % plan.tp)
    if not 1 < plan.tp <= gpus or not plan.sequence_parallel or model.latent is not None or not divided:
        return
    widths = (model.heads * model.head_dim, model.kv_heads * model.head_dim, model.kv_heads * model.head_dim)
    dtype, dense = question.runtime.compute_dtype, model.dense_layers > 0
    for one in _sites(rows, model.hidden, widths, model.ffn, gated=model.gated_mlp, ranks=plan.tp, dtype=dtype):
        if dense or model.ffn // plan.tp not in (*one.columns, one.depth):
            yield one


def _sites(
    rows: int, hidden: int, widths: Sequence[int], ffn: int, *, gated: bool, ranks: int, dtype: str = "bfloat16"
) -> Iterator[OverlapItem]:
    projected = [width // ranks for width in widths]
    inner = [ffn // ranks] * (2 if gated else 1)
    for operation, columns, depth in (
        (GATHER, inner, hidden),
        (SCATTER, [hidden], inner[0]),
        (GATHER, projected, hidden),
        (SCATTER, [hidden], projected[0]),
    ):
        yield OverlapItem(operation=operation, ranks=ranks, rows=rows, columns=tuple(columns), depth=depth, dtype=dtype)
