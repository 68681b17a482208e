"""Answer a question given as flags: look up names, assume defaults, try GPU counts, and rank the plans.

`planner suggest`, `planner explain` and the explorer ask here, so that their answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.io.figures import gpus_text
from planner.io.inputs import faulty_gpus, read_cluster
from planner.question.case_runtime import refuse_compile, resolve_runtime
from planner.question.cases import DEFAULT_CLUSTER, DEFAULT_MODEL, all_assumed, stated_workload
from planner.question.flags import Flags, refuse_absent
from planner.question.question import Question, question_of
from planner.question.recipes import recipe_settings, usual_framework
from planner.search.deadline import deadline_of, left_s, over
from planner.search.gpu_counts import best_gpu_count, fewest_gpus, with_or_without_off_fabric
from planner.search.infeasible import minimal_gpus
from planner.search.mixed import is_mixed, parts_text, price_of, with_parts
from planner.search.result import SearchResult
from planner.search.search import SearchOptions, explained, suggest
from planner.search.sizes import MAX_GPUS, MAX_NODES_TRIED, gpu_counts, most_gpus
from simulator.config.estimate import SURE, chance
from simulator.config.hf_config import load_model
from simulator.fitting.calibrations import UNMEASURED, Calibrations
from simulator.legality.frameworks import framework_named
from simulator.runtimes.called import called
from topology.cluster import Cluster
from topology.errors import Infeasible


def answer(
    flags: Flags,
    framework: str | None,
    options: SearchOptions,
    *,
    measured: Calibrations = UNMEASURED,
    progress: Callable[[str], None] | None = None,
    early: Callable[[SearchResult], None] | None = None,
) -> SearchResult:
    """Return the best plans for what `flags` state, under the rules of `framework` (`torchtitan@0.3.0` names a
    version, None the usual one).

    `progress` receives progress lines, `early` preliminary results of a single search. Raises Infeasible (exit 3), and
    errors of the named inputs.
    """
    deadline = deadline_of(options.time_limit_s)
    question, assumed = search_question(flags, framework, measured)
    machine, counts = question.cluster, flags.gpus

    def grow(n: int) -> Cluster:
        return read_cluster(flags.cluster or DEFAULT_CLUSTER, n, gpu=flags.gpu)

    if counts == ():
        found = _fewest(question, options, grow, progress, deadline)
        return _with_assumed(found, assumed, measured)

    unsound = faulty_gpus(machine) if counts is None and machine.node_count == 1 else ()
    single = not unsound and (counts is None or len(counts) == 1)

    def run(number: int) -> SearchResult:
        left = left_s(deadline)
        if left is not None and counts:  # shared with the GPU counts that are still to be tried
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
    elif counts is None and is_mixed(machine):

        def of_part(part: Cluster) -> SearchResult:
            brief = replace(options, time_limit_s=left_s(deadline))
            return suggest(replace(question, cluster=part, gpus=part.gpu_count), brief, grow=grow, progress=progress)

        found = with_parts(lambda: run(machine.gpu_count), of_part, machine, options.objective)
    else:
        found = run(counts[0] if counts else machine.gpu_count)
        if is_mixed(machine):
            best = found.plans[0]
            said = (price_of(found.question, best.plan, best.estimate), parts_text(machine))
            found = replace(found, assumed=(*found.assumed, *said))
    return _with_assumed(found, assumed, measured)


def _with_assumed(found: SearchResult, assumed: Sequence[str], measured: Calibrations) -> SearchResult:
    plans = [one.plan for one in found.plans]
    return replace(found, assumed=all_assumed([*found.assumed, *assumed], plans, found.question, measured))


def _fewest(
    question: Question,
    options: SearchOptions,
    grow: Callable[[int], Cluster],
    progress: Callable[[str], None] | None,
    deadline: float | None,
) -> SearchResult:
    """Return the plans on the fewest GPUs on which one surely fits, with the results for fewer GPUs."""
    most = most_gpus(question.cluster, grow)
    try:
        least, machine, proof = minimal_gpus(question, bounds=options.bounds, grow=grow, deadline=deadline, limit=most)
    except Infeasible:
        if most < MAX_GPUS:  # all that the cluster states: the error of a search on them says what is missing
            suggest(replace(question, gpus=most), options, grow=grow, progress=progress)
        raise

    def run(number: int) -> SearchResult:
        here = replace(question, cluster=machine if number == least else grow(number), gpus=number)
        brief = replace(options, time_limit_s=left_s(deadline), reasons=False)
        return suggest(here, brief, grow=grow, progress=progress)

    price = options.gpu_price_per_hour
    possible = gpu_counts(question.cluster, least, most, MAX_NODES_TRIED)
    found = fewest_gpus(run, possible, gpu_price_per_hour=price, deadline=deadline)
    if options.reasons and not over(deadline):
        found = explained(found, options)
    first = found.plans[0]
    surely = "surely fit" if first.fit_probability >= SURE else "may fit"
    tried = [(row.gpus, row.fit_probability) for row in found.by_gpus if row.gpus < first.plan.gpus]
    less = [f"{gpus_text(gpus)} may do, {chance(likely)} likely" for gpus, likely in tried if likely is not None]
    said = [f"{gpus_text(first.plan.gpus)} are the fewest that {surely}", *less, proof]
    return replace(
        found,
        by_gpus=found.by_gpus if len(found.by_gpus) > 1 else (),
        assumed=(*found.assumed, "; ".join(part for part in said if part)),
    )


def search_question(
    flags: Flags, framework: str | None, measured: Calibrations = UNMEASURED
) -> tuple[Question, list[str]]:
    """Return the question on the largest GPU count that `flags` name, and its assumptions."""
    network = load_model(flags.model or DEFAULT_MODEL)
    refuse_absent(flags, network)
    machine = read_cluster(flags.cluster or DEFAULT_CLUSTER, max(flags.gpus) if flags.gpus else None, gpu=flags.gpu)
    framework, from_gpus = (framework, []) if framework else usual_framework(machine, flags.runtime)
    rules, version = framework_named(framework), called(framework)[1] or None
    # The batch is fixed before the GPU count is chosen, since it must not grow with the answer.
    largest = max(flags.gpus) if flags.gpus else machine.gpus_per_node if flags.gpus == () else machine.gpu_count
    workload, whose = stated_workload(flags, network, largest)
    stated = {"name": rules.runtime_name, "version": version, **flags.runtime}
    stated, _, from_recipes = recipe_settings(stated, {}, network, machine, workload)
    runtime, from_runtime = resolve_runtime(stated)
    refuse_compile(flags.runtime, runtime.name)
    question = question_of(
        network, machine, workload, framework=rules, runtime=runtime, calibration=measured.on(machine)
    )
    said = [*from_gpus, *network.assumed, *from_recipes, *from_runtime]
    return question, [*all_assumed(said, (), question, measured), *whose]
