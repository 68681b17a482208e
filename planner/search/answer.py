"""Answer a question given as flags: look up names, assume defaults, try GPU counts, and rank the plans.

`planner suggest`, `planner explain` and the explorer ask here, so that their answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.io.inputs import faulty_gpus, read_cluster
from planner.question.case_runtime import resolve_runtime
from planner.question.cases import DEFAULT_CLUSTER, DEFAULT_MODEL, all_assumed, stated_workload
from planner.question.flags import Flags
from planner.question.question import Question, question_of
from planner.search.deadline import deadline_of, left_s
from planner.search.gpu_counts import best_gpu_count, objective_value
from planner.search.infeasible import minimal_gpus
from planner.search.result import SearchResult
from planner.search.search import SearchOptions, suggest
from simulator.config.hf_config import load_model
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.frameworks import framework_named
from topology.cluster import Cluster
from topology.errors import Infeasible


def answer(
    flags: Flags,
    framework: str,
    options: SearchOptions,
    *,
    measured: Calibrations = UNMEASURED,
    progress: Callable[[str], None] | None = None,
    early: Callable[[SearchResult], None] | None = None,
) -> SearchResult:
    """Return the best plans for what `flags` state, under the rules of `framework` (`torchtitan@0.3.0` names a
    version).

    `progress` receives progress lines, `early` the plans of a single search before they are simulated. Raises
    Infeasible (exit 3), and errors of the named inputs.
    """
    deadline = deadline_of(options.time_limit_s)
    question, assumed = search_question(flags, framework, measured)
    machine, counts = question.cluster, flags.gpus

    def grow(n: int) -> Cluster:
        return read_cluster(flags.cluster or DEFAULT_CLUSTER, n, gpu=flags.gpu)

    if counts == ():
        fewest, machine, proof = minimal_gpus(question, bounds=options.bounds, grow=grow, deadline=deadline)
        counts = (fewest,)
        assumed.append(f"{fewest} GPUs is the fewest that fit" + (f": {proof}" if proof else ""))

    unsound = faulty_gpus(machine) if counts is None and machine.node_count == 1 else ()
    single = not unsound and (counts is None or len(counts) == 1)

    def run(number: int) -> SearchResult:
        left = left_s(deadline)
        if left is not None and counts:  # shared with those that are still to be tried
            left /= sum(number <= count for count in set(counts))
        on = machine if counts is None or len(counts) == 1 else grow(number)
        here = replace(question, cluster=on, gpus=number)
        first = early if single else None
        return suggest(here, replace(options, time_limit_s=left), grow=grow, progress=progress, early=first)

    if counts is not None and len(counts) > 1:
        price = options.gpu_price_per_hour
        found = best_gpu_count(run, counts, objective=options.objective, gpu_price_per_hour=price, deadline=deadline)
    elif unsound:
        found = with_or_without_off_fabric(run, gpus=machine.gpu_count, off_fabric=unsound, objective=options.objective)
    else:
        found = run(counts[0] if counts else machine.gpu_count)
    plans = [one.plan for one in found.plans]
    return replace(found, assumed=all_assumed([*found.assumed, *assumed], plans, found.question, measured))


def search_question(flags: Flags, framework: str, measured: Calibrations = UNMEASURED) -> tuple[Question, list[str]]:
    """Return the question on the largest number of GPUs that `flags` name, and what it assumes."""
    rules, version = framework_named(framework), framework.partition("@")[2] or None
    network = load_model(flags.model or DEFAULT_MODEL)
    runtime, from_runtime = resolve_runtime({"name": rules.runtime_name, "version": version, **flags.runtime})
    machine = read_cluster(flags.cluster or DEFAULT_CLUSTER, max(flags.gpus) if flags.gpus else None, gpu=flags.gpu)
    # The batch is fixed before the number of GPUs is chosen: it must not grow with the answer.
    largest = max(flags.gpus) if flags.gpus else machine.gpus_per_node if flags.gpus == () else machine.gpu_count
    workload, whose = stated_workload(flags, network, largest)
    question = question_of(
        network, machine, workload, framework=rules, runtime=runtime, calibration=measured.on(machine)
    )
    return question, [*all_assumed([*network.assumed, *from_runtime], (), question, measured), *whose]


# Whether to use GPUs that are off the NVLink fabric: plan with them and without them, and return the better plan.
#
# One GPU without NVLink slows every group it belongs to down to PCIe, so leaving it out often wins although fewer GPUs
# work (a GB300 tray with one such GPU: 51.6 against 684.9 GB/s, datacrunch-research/nccl-eBPF, 2026-08-14).


def with_or_without_off_fabric(
    search: Callable[[int], SearchResult], *, gpus: int, off_fabric: Sequence[int], objective: str = "time"
) -> SearchResult:
    """Return the better of two results by `objective`: on all `gpus`, and on those without the `unsound` ones.

    If the GPUs without them have no plan, fewer are tried. Raises Infeasible when neither has a plan.
    """
    found: SearchResult | None = None
    failure: Infeasible | None = None
    try:
        found = search(gpus)
    except Infeasible as error:
        failure = error
    for count in range(gpus - len(off_fabric), 0, -1):
        try:
            fewer = search(count)
        except Infeasible:
            continue
        if found is None or _best_value(fewer, objective) < _best_value(found, objective):
            found = _with_note(fewer, found, off_fabric)
        break
    if found is None:
        assert failure is not None  # noqa: S101 - one of the two is always set
        raise failure
    return found


def _best_value(result: SearchResult, objective: str) -> float:
    return objective_value(result.plans[0].estimate, objective)


def _with_note(fewer: SearchResult, whole: SearchResult | None, off_fabric: Sequence[int]) -> SearchResult:
    named = ", ".join(f"GPU {index}" for index in off_fabric)
    used = fewer.plans[0].plan.gpus
    if whole is None:
        reason = "no plan fits with it"
    else:
        slow, fast = whole.plans[0].estimate.step_s.value, fewer.plans[0].estimate.step_s.value
        reason = f"with it the best step takes {slow:.3g} s, on {used} GPUs without it {fast:.3g} s"
    note = f"{named} off the NVLink fabric left out: {reason}"
    return replace(fewer, assumed=(*fewer.assumed, note))
