"""Search results and estimates as tables and lines of text for people. Units are in the headings.

On a terminal narrower than `WIDE` columns, plans and their figures are two tables, since both together do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from textwrap import wrap

from rich.console import Console
from rich.table import Table

from planner.explain.plan_answer import PlanAnswer
from planner.io.output import console, printable
from planner.search.flips import GIB, FlipPoint
from planner.search.headroom import memory_text
from planner.search.result import GpuCountRow, RankedPlan, SearchResult
from planner.search.scaling import network_bytes_per_s, nvlink_bytes_per_s
from simulator.config.estimate import Estimate, Fit, Interval
from simulator.config.model import Model
from simulator.config.overlap_sites import tp_overlap_label
from simulator.config.plan import Plan
from simulator.config.runtime import Runtime
from simulator.config.workload import Workload
from topology.cluster import Cluster, LinkKind
from topology.rates.reach import mixed_gpus

WIDE = 150
LABEL = 10  # width of the label at the left of a line


def degrees_text(plan: Plan) -> str:
    """Return the parallel degrees as a product: `32 = dp 1 x fsdp 4 x tp 8 x pp 1`."""
    factors = [f"dp {plan.dp_replicate}", f"fsdp {plan.dp_shard}"]
    if plan.zero_stage is not None:
        zero = f" (ZeRO-{plan.zero_stage})" if plan.zero_stage else ""
        factors = [f"dp {plan.dp_replicate}{zero}"] + ([f"fsdp {plan.dp_shard}"] if plan.dp_shard > 1 else [])
    factors += [f"cp {plan.cp}"] if plan.cp > 1 else []
    factors += [f"tp {plan.tp}", f"pp {plan.pp}"]
    return f"{plan.gpus} = {' x '.join(factors)}"


def policy_text(plan: Plan) -> str:
    """Return everything but the degrees: micro batch, recompute, schedule, experts, sequence parallelism, ..."""
    parts = [f"micro batch {plan.micro_batch_size}", f"recompute {plan.recompute}"]
    if plan.ep > 1:
        parts.insert(0, f"ep {plan.ep}")
    if plan.sequence_parallel and plan.tp > 1:
        parts.append("sp")
    if plan.pp > 1:
        parts.append((plan.schedule or "1F1B") + (f" x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    if plan.tp_overlap != "none":
        parts.append(f"tp overlap {tp_overlap_label(plan.tp_overlap)}")
    if plan.cp > 1 and plan.cp_method:
        parts.append(f"cp by {plan.cp_method.replace('_', '-')}")
    if plan.recompute_per_stage:
        parts.append(f"recompute by stage {run_length_text(plan.recompute_per_stage)}")
    if plan.layers_per_stage:
        parts.append(f"layers by stage {run_length_text(plan.layers_per_stage)}")
    if plan.reshard_after_forward is not None and plan.dp_shard * plan.cp > 1:
        parts.append("reshard" if plan.reshard_after_forward else "no reshard")
    return ", ".join(parts)


def run_length_text(values: Sequence[object]) -> str:
    """Return a list with repetitions counted: `2 x full, 6 x none`."""
    groups = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{count} x {value}" if count > 1 else f"{value}" for value, count in groups)


def estimate_cells(estimate: Estimate) -> list[str]:
    """Return the table cells of one estimate, in the order of `HEADINGS`."""
    step = estimate.step_s
    parts = estimate.breakdown_s
    memory = estimate.memory
    return [
        interval_text(step),
        f"{estimate.tokens_per_s_per_gpu:,.0f}",
        f"{estimate.mfu:.1%}",
        f"{memory.reserved_bytes / GIB:.1f} {memory.fit}",
        share_text(parts.get("exposed_communication", 0.0), step.value),
        share_text(parts.get("bubble", 0.0), step.value),
    ]


HEADINGS = ("step s (80% range)", "tok/s/GPU", "MFU", "peak GiB, fits", "exposed comm", "bubble")


def interval_text(value: Interval) -> str:
    """Return a value and its range to about three digits, which is as much as is known."""
    digits = step_digits(value.value)
    return f"{value.value:.{digits}f} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def step_digits(step_s: float) -> int:
    return 3 if step_s < 1 else 2 if step_s < 10 else 1


def share_text(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if part > 0 else "-"


def print_search(result: SearchResult, *, out: str | None) -> None:
    """Print the answer of `planner suggest`."""
    screen = console()
    best = result.plans[0]
    lines = [
        f"cluster   {cluster_line(result.question.cluster)}",
        f"model     {model_line(result.question.model)}",
        f"workload  {workload_line(result.question.workload)}",
        f"runtime   {runtime_line(result.question.runtime, result.question.framework.title)}",
        *assumed_lines(result.assumed),
        f"searched  {search_line(result)}",
    ]
    print_lines(screen, lines)
    print_plans(result.plans)
    print_gpu_counts(result.by_gpus)
    reasons = []
    for ranked in result.plans[1:]:
        flips = "; ".join(flip_text(flip) for flip in ranked.flips)
        reasons.append(f"why #{ranked.rank} lost: {ranked.lost_because}" + (f"; {flips}" if flips else ""))
    if result.search.simulated:
        seconds = ", ".join(f"#{p.rank} {p.simulated_s:#.4g} s" for p in result.plans if p.simulated_s is not None)
        reasons.append(f"simulated: {seconds}; the closed form cannot tell plans apart that are this close")
        reserved, has = result.plans[0].simulated_bytes or 0.0, best.estimate.memory.capacity_bytes
        if reserved > has:
            reasons.append(
                f"careful: the simulated allocator of #1 reserves {reserved / GIB:.1f} of {has / GIB:.1f} GiB, as its memory "
                "fragments; all plans this close do"
            )
    if best.cost_per_million_tokens is not None and not result.by_gpus:
        reasons.append(f"cost of #1: {best.cost_per_million_tokens:.3g} for a million tokens, at the price given")
    notes = [f"[{problem.grade}] {problem.message}" for problem in best.problems]
    print_lines(screen, [*reasons, *(f"note on #1: {line}" for line in notes), *legend_lines(best.estimate)])
    print_lines(screen, [f"memory of #1: {memory_text(best.estimate, best.room)}{_next_fitting_plan(result.plans)}"])
    print_lines(screen, [f"of it {memory_line(best.estimate)}"])
    if out:
        print_lines(screen, [f"saved {out}", f"next: planner estimate --plan {out}"])
    else:
        print_lines(screen, ["next: planner suggest ... --out plan.json"])


def _next_fitting_plan(plans: Sequence[RankedPlan]) -> str:
    """Return a note on the first listed plan that surely fits, where plan #1 may not and its own variant is slower."""
    first = plans[0]
    if first.estimate.memory.fit is Fit.YES:
        return ""
    fitting = [plan for plan in plans[1:] if plan.estimate.memory.fit is Fit.YES]
    if not fitting or (
        first.room and first.room.fit is Fit.YES and first.room.step_s <= fitting[0].estimate.step_s.value
    ):
        return ""
    spare, slower = (
        fitting[0].estimate.memory.headroom_bytes / GIB,
        fitting[0].estimate.step_s.value / first.estimate.step_s.value - 1,
    )
    return f"; #{fitting[0].rank} leaves {spare:.1f} GiB, for {slower:+.1%}"


def print_plans(plans: Sequence[RankedPlan]) -> None:
    """Print the ranked plans: one table on a wide terminal, otherwise one of plans and one of figures."""
    screen = console()
    names = [[_rank_cell(p), degrees_text(p.plan), policy_text(p.plan)] for p in plans]
    if screen.width >= WIDE:
        table = Table(box=None, pad_edge=False)
        for heading, side in (("#", "left"), ("plan", "left"), ("policy", "left")):
            table.add_column(heading, justify=side)  # type: ignore[arg-type]  # a literal type we hold as str
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for name, ranked in zip(names, plans, strict=True):
            table.add_row(*name, *estimate_cells(ranked.estimate))
        screen.print(table)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("#", "plan", "policy"):
        table.add_column(heading, overflow="fold")
    for name in names:
        table.add_row(*name)
    numbers = Table(box=None, pad_edge=False)
    numbers.add_column("#")
    for heading in HEADINGS:
        numbers.add_column(heading, justify="right")
    for ranked in plans:
        numbers.add_row(_rank_cell(ranked), *estimate_cells(ranked.estimate))
    screen.print(table)
    screen.print()
    screen.print(numbers)


def print_gpu_counts(rows: Sequence[GpuCountRow]) -> None:
    """Print the best plan on each GPU count, where several were compared."""
    if not rows:
        return

    table = Table(box=None, pad_edge=False)
    has_cost = any(row.cost_per_million_tokens is not None for row in rows)
    for heading in ("GPUs", "step s", "tok/s/GPU", "peak GiB", *(["cost / M tokens"] if has_cost else []), "plan"):
        table.add_column(heading, justify="left" if heading == "plan" else "right", overflow="fold")
    for row in rows:
        if row.plan is None or row.step_s is None:
            table.add_row(str(row.gpus), *["-"] * (3 + has_cost), printable(row.problem))
            continue
        cost = [f"{row.cost_per_million_tokens:.3g}"] if row.cost_per_million_tokens is not None else []
        table.add_row(
            str(row.gpus),
            f"{row.step_s:.{step_digits(row.step_s)}f}",
            f"{row.tokens_per_s_per_gpu:,.0f}",
            f"{(row.reserved_bytes or 0.0) / GIB:.1f}",
            *cost,
            degrees_text(row.plan),
        )
    console().print(table)


def _rank_cell(ranked: RankedPlan) -> str:
    return f"{'*' if ranked.rank == 1 else ' '} {ranked.rank}"


def print_estimate(found: PlanAnswer) -> None:
    """Print the answer of `planner estimate` for one plan."""
    case, question, plan, estimate = found.case, found.case.question, found.case.plan, found.estimate
    screen = console()
    print_lines(
        screen,
        [
            f"case      {case.id}",
            f"cluster   {cluster_line(question.cluster)}",
            f"model     {model_line(question.model)}",
            f"workload  {workload_line(question.workload)}",
            f"runtime   {runtime_line(question.runtime, question.framework.title)}",
            f"plan      {degrees_text(plan)}; {policy_text(plan)}",
            *changed_lines(case.changed),
            *assumed_lines(case.assumed),
            *(f"{problem.grade!s:9} {problem.message}" for problem in found.problems),
        ],
    )
    if estimate is None:
        print_lines(screen, ["verdict   not legal: nothing to estimate"])
        return

    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    table.add_row(*estimate_cells(estimate))
    screen.print(table)
    print_lines(screen, [f"memory    {memory_text(estimate, found.room)}", f"of it     {memory_line(estimate)}"])
    parts = sorted(estimate.breakdown_s.items(), key=lambda item: -item[1])
    print_lines(
        screen,
        [
            "step      "
            + ", ".join(
                f"{n.replace('_', ' ')} {v:.3g} s" for n, v in parts if v >= LEAST_TERM * estimate.step_s.value
            ),
            *legend_lines(estimate),
        ],
    )


LEAST_TERM = 5e-4  # of a step, below which a part of it is no term of the sum
LEAST_SHARE = 0.005  # of a step, below which a source is not named


def legend_lines(estimate: Estimate) -> list[str]:
    """Return the lines that say what the figures mean and what they are based on."""
    step, has = estimate.step_s, estimate.memory.capacity_bytes / GIB
    low, high = (step.low / step.value - 1, step.high / step.value - 1) if step.value else (0.0, 0.0)
    if step.source in {"datasheet", "assumed"}:
        basis = "datasheet numbers, uncalibrated"
    else:
        shares = (f"{share:.0%} {source}" for source, share in estimate.sources.items() if share >= LEAST_SHARE)
        basis = f"of the step's time {', '.join(shares) or step.source}"
    return [
        f"{basis}: 80% of steps are expected between {low:+.0%} and {high:+.0%} of the value",
        f"MFU counts model FLOPs (no recompute) against the dense peak of {estimate.peak_flops / 1e12:.0f} TFLOP/s",
        f"peak GiB is what the allocator holds on the worst rank, of {has:.1f} GiB: yes where its whole 80% range fits",
    ]


def assumed_lines(assumed: Sequence[str]) -> list[str]:
    return [f"assumed   {'; '.join(assumed)}"] if assumed else []


def changed_lines(changed: Sequence[str]) -> list[str]:
    """Return one line for everything that flags changed of a file."""
    return [f"changed: {'; '.join(changed)}"] if changed else []


def memory_line(estimate: Estimate) -> str:
    memory = estimate.memory
    parts = sorted(memory.by_category.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in parts if size >= 0.05 * GIB)
    peak = memory.peak_bytes
    return (
        f"allocated {peak.value / GIB:.1f} GiB ({peak.low / GIB:.1f}-{peak.high / GIB:.1f}) on rank "
        f"{memory.worst_rank}: {named} GiB"
    )


def direct_links(cluster: Cluster) -> tuple[float, int, int] | None:
    """Return bytes per second of the links from the GPU with least to other GPUs, how many it reaches, and how many
    others there are; None where GPUs are joined by a switch or not at all, or a rate is not known.
    """
    node = cluster.groups[0].node
    links = [link for link in node.links if link.kind is LinkKind.NVLINK]
    if not links or any(link.bytes_per_s is None for link in links):
        return None
    own = [[link for link in links if gpu.vertex in {link.a, link.b}] for gpu in node.gpus]
    rate, peers = min((sum(link.bytes_per_s or 0.0 for link in mine), len(mine)) for mine in own)
    return (rate, peers, len(node.gpus) - 1) if peers else None


def cluster_line(cluster: Cluster) -> str:

    kind = cluster.slowest_kind
    link = nvlink_bytes_per_s(cluster)
    network = network_bytes_per_s(cluster)
    plural = "s" if cluster.node_count > 1 else ""
    has_nvlink = any(link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} for link in cluster.groups[0].node.links)
    parts = [f"{cluster.name}: {cluster.node_count} node{plural} x {cluster.gpus_per_node} {kind.title}"]
    if mixed := mixed_gpus(cluster):
        parts.append(mixed[0])
    if cluster.gpu_memory_bytes:
        parts.append(f"{cluster.gpu_memory_bytes / GIB:.1f} GiB")
    name = "xGMI" if kind.architecture.startswith("CDNA") else "NVLink"
    direct = direct_links(cluster)
    if direct is not None:
        rate, peers, others = direct
        reach = "" if peers == others else f" to {peers} of {others} other GPUs"
        parts.append(f"{name} {rate / 1e9:.0f} GB/s/GPU{reach}")
    elif link:
        parts.append(f"{name} {link / 1e9:.0f} GB/s/GPU")
    else:
        parts.append(f"{name} of unknown rate" if has_nvlink else f"no {name}")
    if cluster.node_count > 1:
        parts.append(f"network {network / 1e9:.1f} GB/s/GPU" if network else "no network described")
    return " | ".join(parts)


def model_line(model: Model) -> str:
    moe = f", {model.moe.experts} experts ({model.moe.experts_per_token} used)" if model.moe else ""
    return (
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters, {model.layers} layers, {model.heads} heads / "
        f"{model.kv_heads} KV{moe}"
    )


def workload_line(workload: Workload) -> str:
    tokens = workload.tokens_per_step
    return f"train, sequence {workload.seq_len}, global batch {workload.global_batch_size} ({tokens:,} tokens a step)"


def runtime_line(runtime: Runtime, title: str) -> str:
    mode = "compiled" if runtime.compile else "eager"
    return (
        f"{title}, {mode}, parameters {runtime.param_dtype}, compute {runtime.compute_dtype}, gradients reduced in "
        f"{runtime.reduce_dtype}, {runtime.optimizer}"
    )


def search_line(result: SearchResult) -> str:
    search = result.search
    parts = [
        f"{search.legal:,} legal of {search.candidates:,} candidates, {search.legal - search.fitting:,} fail memory",
        f"{search.status} (gap {search.gap:.1%})",
        f"{search.seconds:.1f} s",
    ]
    if search.filled:
        proof = f"to {search.filled_gap:.1%}" if search.filled_gap > 5e-4 else "exactly"
        parts.append(f"stages of {search.filled} pipelines filled {proof}")
    if search.pruned:
        parts.append("left out by bounds: " + ", ".join(f"{name} {n:,}" for name, n in search.pruned.items()))
    return "; ".join(parts)


def flip_text(flip: FlipPoint) -> str:
    """Return a flip point as text: `wins if network per GPU < 31.0 GB/s (now 50.0)`."""
    scale, unit = (GIB, "GiB") if flip.unit == "bytes" else (1e9, "GB/s")
    sign = "<" if flip.wins == "below" else ">"
    return f"wins if {flip.quantity} {sign} {flip.at / scale:.1f} {unit} (now {flip.now / scale:.1f})"


def print_lines(screen: Console, lines: Sequence[str]) -> None:
    """Print lines; long ones are wrapped and indented to their text, past the label."""
    for line in lines:
        labelled = len(line) > LABEL and line[LABEL - 1] == " " and line[LABEL] != " "
        indent = " " * (LABEL if labelled else 2)
        for folded in wrap(printable(line), max(40, screen.width), subsequent_indent=indent) or [""]:
            screen.print(folded)
