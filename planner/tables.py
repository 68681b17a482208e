"""Answers as tables for people. Units are in the headings; nothing here decides anything.

Below `WIDE` columns the plan gets a table of its own and the figures another, because eight columns of figures and a
plan do not fit into eighty characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from planner.flips import GIB, Flip
from planner.headroom import Room, room_text
from planner.output import console, printable
from simulator.estimate import Estimate, Fit, Interval
from simulator.overlap_sites import spoken
from simulator.plan import Plan
from simulator.runtime import Runtime
from simulator.workload import Workload
from topology.cluster import Cluster, LinkKind

if TYPE_CHECKING:
    from rich.console import Console

    from planner.counts import CountRow
    from planner.legality import Problem
    from planner.search import RankedPlan, SearchResult
    from simulator.model import Model

WIDE = 150
LABEL = 10  # width of the labels at the left


def arithmetic(plan: Plan) -> str:
    """Return the product that makes the GPU count: `32 = dp 1 x fsdp 4 x tp 8 x pp 1`."""
    factors = [f"dp {plan.dp_replicate}", f"fsdp {plan.dp_shard}"]
    if plan.zero_stage is not None:
        zero = f" (ZeRO-{plan.zero_stage})" if plan.zero_stage else ""
        factors = [f"dp {plan.dp_replicate}{zero}"] + ([f"fsdp {plan.dp_shard}"] if plan.dp_shard > 1 else [])
    factors += [f"cp {plan.cp}"] if plan.cp > 1 else []
    factors += [f"tp {plan.tp}", f"pp {plan.pp}"]
    return f"{plan.gpus} = {' x '.join(factors)}"


def policy(plan: Plan) -> str:
    """Return what is beside the degrees: micro batch, recompute, schedule, experts, sequence parallelism."""
    parts = [f"micro batch {plan.micro_batch_size}", f"recompute {plan.recompute}"]
    if plan.ep > 1:
        parts.insert(0, f"ep {plan.ep}")
    if plan.sequence_parallel and plan.tp > 1:
        parts.append("sp")
    if plan.pp > 1:
        parts.append((plan.schedule or "1F1B") + (f" x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    if plan.tp_overlap != "none":
        parts.append(f"tp overlap {spoken(plan.tp_overlap)}")
    if plan.cp > 1 and plan.cp_method:
        parts.append(f"cp by {plan.cp_method.replace('_', '-')}")
    if plan.recompute_per_stage:
        parts.append(f"recompute by stage {runs(plan.recompute_per_stage)}")
    if plan.layers_per_stage:
        parts.append(f"layers by stage {runs(plan.layers_per_stage)}")
    if plan.reshard_after_forward is not None and plan.dp_shard * plan.cp > 1:
        parts.append("reshard" if plan.reshard_after_forward else "no reshard")
    return ", ".join(parts)


def runs(values: Sequence[object]) -> str:
    """Return a list with repeats counted: `2 x full, 6 x none`."""
    groups = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{count} x {value}" if count > 1 else f"{value}" for value, count in groups)


def figures(estimate: Estimate) -> list[str]:
    """Return the cells of one estimate, in the order of `HEADINGS`."""
    step = estimate.step_s
    parts = estimate.breakdown_s
    memory = estimate.memory
    return [
        interval(step),
        f"{estimate.tokens_per_s_per_gpu:,.0f}",
        f"{estimate.mfu:.1%}",
        f"{memory.reserved_bytes / GIB:.1f} {memory.fit}",
        share(parts.get("exposed_communication", 0.0), step.value),
        share(parts.get("bubble", 0.0), step.value),
    ]


HEADINGS = ("step s (80% range)", "tok/s/GPU", "MFU", "peak GiB, fits", "exposed comm", "bubble")


def interval(value: Interval) -> str:
    """Return a value and its range in three digits: more would say more than is known."""
    digits = step_digits(value.value)
    return f"{value.value:.{digits}f} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def step_digits(step_s: float) -> int:
    return 3 if step_s < 1 else 2 if step_s < 10 else 1


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if part > 0 else "-"


def print_search(result: SearchResult, *, out: str | None) -> None:
    """Print the answer of `planner suggest`."""
    screen = console()
    best = result.plans[0]
    lines = [
        f"cluster   {cluster_line(result.cluster)}",
        f"model     {model_line(result.model)}",
        f"workload  {workload_line(result.workload)}",
        f"runtime   {runtime_line(result.runtime, result.framework.title)}",
        *assumed_lines(result.assumed),
        f"searched  {search_line(result)}",
    ]
    say(screen, lines)
    print_plans(result.plans)
    print_counts(result.by_gpus)
    reasons = []
    for ranked in result.plans[1:]:
        flips = "; ".join(flip_text(flip) for flip in ranked.flips)
        reasons.append(f"why #{ranked.rank} lost: {ranked.lost_because}" + (f"; {flips}" if flips else ""))
    if result.search.simulated:
        seconds = ", ".join(f"#{p.rank} {p.simulated_s:#.4g} s" for p in result.plans if p.simulated_s is not None)
        reasons.append(f"simulated: {seconds}; the closed form cannot tell plans apart that are this close")
        held, has = result.plans[0].simulated_bytes or 0.0, best.estimate.memory.capacity_bytes
        if held > has:
            reasons.append(
                f"careful: the simulated allocator of #1 reserves {held / GIB:.1f} of {has / GIB:.1f} GiB, as its memory "
                "fragments; all plans this close do"
            )
    notes = [f"[{problem.grade}] {problem.message}" for problem in best.problems]
    say(screen, [*reasons, *(f"note on #1: {line}" for line in notes), *legend(best.estimate)])
    say(screen, [f"memory of #1: {room_text(best.estimate, best.room)}{_roomier(result.plans)}"])
    say(screen, [f"of it {memory_line(best.estimate)}"])
    if out:
        say(screen, [f"saved {out}", f"next: planner estimate --plan {out}"])
    else:
        say(screen, ["next: planner suggest ... --out plan.json"])


def _roomier(plans: Sequence[RankedPlan]) -> str:
    """Return which plan of the list surely fits where the first may not, if that costs less than what gives it room."""
    first = plans[0]
    if first.estimate.memory.fit is Fit.YES:
        return ""
    sure = [plan for plan in plans[1:] if plan.estimate.memory.fit is Fit.YES]
    if not sure or (first.room and first.room.fit is Fit.YES and first.room.step_s <= sure[0].estimate.step_s.value):
        return ""
    spare, behind = (
        sure[0].estimate.memory.headroom_bytes / GIB,
        sure[0].estimate.step_s.value / first.estimate.step_s.value - 1,
    )
    return f"; #{sure[0].rank} leaves {spare:.1f} GiB, for {behind:+.1%}"


def print_plans(plans: Sequence[RankedPlan]) -> None:
    """Print the ranked plans: one table where there is room, else plans and figures apart."""
    from rich.table import Table  # noqa: PLC0415 - keeps `--help` light

    screen = console()
    names = [[_mark(p), arithmetic(p.plan), policy(p.plan)] for p in plans]
    if screen.width >= WIDE:
        table = Table(box=None, pad_edge=False)
        for heading, side in (("#", "left"), ("plan", "left"), ("policy", "left")):
            table.add_column(heading, justify=side)  # type: ignore[arg-type]  # a literal type we hold as str
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for name, ranked in zip(names, plans, strict=True):
            table.add_row(*name, *figures(ranked.estimate))
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
        numbers.add_row(_mark(ranked), *figures(ranked.estimate))
    screen.print(table)
    screen.print()
    screen.print(numbers)


def print_counts(rows: Sequence[CountRow]) -> None:
    """Print what each number of GPUs comes to, where several were compared."""
    if not rows:
        return
    from rich.table import Table  # noqa: PLC0415 - keeps `--help` light

    table = Table(box=None, pad_edge=False)
    priced = any(row.cost_per_million_tokens is not None for row in rows)
    for heading in ("GPUs", "step s", "tok/s/GPU", "peak GiB", *(["cost / M tokens"] if priced else []), "plan"):
        table.add_column(heading, justify="left" if heading == "plan" else "right", overflow="fold")
    for row in rows:
        if row.plan is None or row.step_s is None:
            table.add_row(str(row.gpus), *["-"] * (3 + priced), printable(row.problem))
            continue
        cost = [f"{row.cost_per_million_tokens:.3g}"] if row.cost_per_million_tokens is not None else []
        table.add_row(
            str(row.gpus),
            f"{row.step_s:.{step_digits(row.step_s)}f}",
            f"{row.tokens_per_s_per_gpu:,.0f}",
            f"{(row.reserved_bytes or 0.0) / GIB:.1f}",
            *cost,
            arithmetic(row.plan),
        )
    console().print(table)


def _mark(ranked: RankedPlan) -> str:
    return f"{'*' if ranked.rank == 1 else ' '} {ranked.rank}"


def print_estimate(
    *,
    name: str,
    plan: Plan,
    model: Model,
    cluster: Cluster,
    workload: Workload,
    runtime: Runtime,
    framework: str,
    assumed: Sequence[str],
    problems: Sequence[Problem],
    estimate: Estimate | None,
    room: Room | None = None,
) -> None:
    """Print the answer of `planner estimate` for one plan; `room` is what would give it more memory."""
    screen = console()
    say(
        screen,
        [
            f"case      {name}",
            f"cluster   {cluster_line(cluster)}",
            f"model     {model_line(model)}",
            f"workload  {workload_line(workload)}",
            f"runtime   {runtime_line(runtime, framework)}",
            f"plan      {arithmetic(plan)}; {policy(plan)}",
            *assumed_lines(assumed),
            *(f"{problem.grade!s:9} {problem.message}" for problem in problems),
        ],
    )
    if estimate is None:
        say(screen, ["verdict   not legal: nothing to estimate"])
        return
    from rich.table import Table  # noqa: PLC0415 - keeps `--help` light

    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    table.add_row(*figures(estimate))
    screen.print(table)
    say(screen, [f"memory    {room_text(estimate, room)}", f"of it     {memory_line(estimate)}"])
    parts = sorted(estimate.breakdown_s.items(), key=lambda item: -item[1])
    say(
        screen,
        ["step      " + ", ".join(f"{n.replace('_', ' ')} {v:.3g} s" for n, v in parts if v > 0), *legend(estimate)],
    )


LEAST_SHARE = 0.005  # of a step, below which a source is not worth a word


def legend(estimate: Estimate) -> list[str]:
    """Return the lines that say what the figures mean and rest on."""
    step, has = estimate.step_s, estimate.memory.capacity_bytes / GIB
    low, high = (step.low / step.value - 1, step.high / step.value - 1) if step.value else (0.0, 0.0)
    if step.source in {"datasheet", "assumed"}:
        sure = "datasheet numbers, uncalibrated"
    else:
        shares = (f"{share:.0%} {source}" for source, share in estimate.sources.items() if share >= LEAST_SHARE)
        sure = f"of the step's time {', '.join(shares) or step.source}"
    return [
        f"{sure}: 80% of steps are expected between {low:+.0%} and {high:+.0%} of the value",
        f"MFU counts model FLOPs (no recompute) against the dense peak of {estimate.peak_flops / 1e12:.0f} TFLOP/s",
        f"peak GiB is what the allocator holds on the worst rank, of {has:.1f} GiB: yes where its whole 80% range fits",
    ]


def assumed_lines(assumed: Sequence[str]) -> list[str]:
    return [f"assumed   {'; '.join(assumed)}"] if assumed else []


def memory_line(estimate: Estimate) -> str:
    memory = estimate.memory
    parts = sorted(memory.by_category.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in parts if size >= 0.05 * GIB)
    peak = memory.peak_bytes
    return (
        f"allocated {peak.value / GIB:.1f} GiB ({peak.low / GIB:.1f}-{peak.high / GIB:.1f}) on rank "
        f"{memory.worst_rank}: {named} GiB"
    )


def cluster_line(cluster: Cluster) -> str:
    from planner.scaling import network_bytes_per_s, nvlink_bytes_per_s  # noqa: PLC0415 - numbers for people only

    kind = cluster.slowest_kind
    link = nvlink_bytes_per_s(cluster)
    network = network_bytes_per_s(cluster)
    plural = "s" if cluster.node_count > 1 else ""
    joined = any(link.kind in {LinkKind.NVLINK, LinkKind.NVSWITCH} for link in cluster.groups[0].node.links)
    parts = [f"{cluster.name}: {cluster.node_count} node{plural} x {cluster.gpus_per_node} {kind.title}"]
    if cluster.gpu_memory_bytes:
        parts.append(f"{cluster.gpu_memory_bytes / GIB:.1f} GiB")
    if link:
        parts.append(f"NVLink {link / 1e9:.0f} GB/s/GPU")
    else:
        parts.append("NVLink of unknown rate" if joined else "no NVLink")
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


def flip_text(flip: Flip) -> str:
    """Return a flip as a sentence: `wins if network per GPU < 31.0 GB/s (now 50.0)`."""
    scale, unit = (GIB, "GiB") if flip.unit == "bytes" else (1e9, "GB/s")
    sign = "<" if flip.wins == "below" else ">"
    return f"wins if {flip.quantity} {sign} {flip.at / scale:.1f} {unit} (now {flip.now / scale:.1f})"


def say(screen: Console, lines: Sequence[str]) -> None:
    """Print lines, long ones folded under their text rather than under their label."""
    from textwrap import wrap  # noqa: PLC0415 - only where something is printed

    for line in lines:
        labelled = len(line) > LABEL and line[LABEL - 1] == " " and line[LABEL] != " "
        indent = " " * (LABEL if labelled else 2)
        for folded in wrap(printable(line), max(40, screen.width), subsequent_indent=indent) or [""]:
            screen.print(folded)
