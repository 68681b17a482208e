"""Explanations and comparisons as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from rich.table import Table

from planner.explain.compare_plans import Comparison
from planner.explain.explain import AnswerFlip, Explanation, MemoryAccount
from planner.explain.overlap_account import SiteOverlap
from planner.explain.tables import (
    changed_lines,
    cluster_line,
    degrees_text,
    flip_text,
    model_line,
    policy_text,
    print_lines,
    runtime_line,
    workload_line,
)
from planner.explain.traffic_text import print_traffic, traffic_rows
from planner.explain.waterfall import Waterfall
from planner.io.output import console, printable
from planner.search.flips import GIB, seconds
from planner.search.headroom import memory_text
from planner.search.result import SearchResult
from simulator.config.overlap_sites import NONE

BAR = 24  # characters of the longest bar
NOTHING_S = 1e-7  # differences below are rounding errors
NOTHING_BYTES = 0.005 * GIB  # differences below would be shown as 0.00


def print_explanation(found: Explanation, result: SearchResult, changed: Sequence[str] = ()) -> None:
    """Print the answer of `planner explain`."""
    screen = console()
    comparison = f"; {seconds(found.behind_s)} a step against the best plan" if found.behind_s else "; the best plan"
    print_lines(
        screen,
        [
            f"cluster   {cluster_line(result.question.cluster)}",
            f"model     {model_line(result.question.model)}",
            f"workload  {workload_line(result.question.workload)}",
            f"runtime   {runtime_line(result.question.runtime, result.question.framework.title)}",
            f"plan      {degrees_text(found.plan)}; {policy_text(found.plan)}{comparison}",
            *changed_lines(changed),
            "",
        ],
    )
    print_waterfall(found.waterfall)
    screen.print()
    print_memory(found.memory, memory_text(found.estimate, found.room))
    if found.traffic is not None:
        screen.print()
        print_traffic(found.traffic)
    lines = [
        "",
        *(f"overlap   {overlap_text(site)}" for site in found.overlap),
    ]
    for number, runner in enumerate(found.runners, start=2):
        flips = "; ".join(flip_text(flip) for flip in runner.flips)
        lines.append(
            f"#{number}        {degrees_text(runner.plan)}; {policy_text(runner.plan)}: {runner.lost_because}"
            + (f"; {flips}" if flips else "")
        )
    lines += [f"flip      {answer_flip_text(flip)}" for flip in found.flips]
    counts = ", ".join(f"{name} {count:,}" for name, count in found.rejected.items() if count)
    lines += [f"rejected  {counts}"] if counts else []
    print_lines(screen, lines)


def overlap_text(found: SiteOverlap) -> str:
    """Return a line on the overlap at one communication."""
    if found.mode == NONE:
        return f"{found.site}: none"
    gains = "shortens" if found.saves_s >= 0 else "lengthens"
    return f"{found.site}: {found.mode} hides {seconds(found.hides_s)} and {gains} the step by {seconds(abs(found.saves_s))}"


def print_waterfall(found: Waterfall) -> None:
    """Print the waterfall from the GPU's peak to the achieved step, a bar for each term."""
    table = Table(box=None, pad_edge=False)
    table.add_column("from peak to achieved")
    table.add_column("s", justify="right")
    table.add_column("of the step", justify="right")
    table.add_column("")
    digits = decimals(found.step_s)
    peak = f"model FLOPs at {found.peak_flops / 1e12:.0f} TFLOP/s"
    table.add_row(
        peak, f"{found.peak_s:.{digits}f}", f"{found.peak_s / found.step_s:.1%} (MFU)", _bar(found.peak_s, found.step_s)
    )
    for term in found.terms:
        table.add_row(term.name, f"{term.seconds:+.{digits}f}", f"{term.share:.1%}", _bar(term.seconds, found.step_s))
    table.add_row("achieved", f"{found.step_s:.{digits}f}", "100.0%", "")
    console().print(table)
    print_lines(console(), [f"most      {found.top_loss.name}: {found.top_loss.meaning}"])


def decimals(step_s: float) -> int:
    """Return the decimals that give a step four digits; all its terms are shown with as many, so that they add up."""
    return min(6, max(0, 3 - floor(log10(step_s)))) if step_s > 0 else 3


def _bar(value: float, whole: float) -> str:
    return "#" * max(0, round(BAR * value / whole)) if whole else ""


def print_memory(account: MemoryAccount, verdict: str) -> None:
    """Print bytes by category and stage, what an estimate of model state alone leaves out, and whether they fit."""
    stages = sorted({row.stage for row in account.rows})
    shown = stages if len(stages) <= 8 else sorted({*stages[:3], account.worst_stage, *stages[-2:]})
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB by stage")
    for stage in shown:
        table.add_column(f"{stage}{'*' if stage == account.worst_stage else ''}", justify="right")
    for category in dict.fromkeys(row.category for row in account.rows):
        here = {row.stage: row.nbytes for row in account.rows if row.category == category}
        if not any(here.values()):
            continue
        table.add_row(category.replace("_", " "), *(f"{here.get(stage, 0.0) / GIB:.2f}" for stage in shown))
    console().print(table)
    omitted = ", ".join(f"{name.replace('_', ' ')} {nbytes / GIB:.1f}" for name, nbytes in account.omitted)
    worst = (
        f"worst     stage {account.worst_stage}, rank {account.worst_rank}: allocated "
        f"{account.allocated_bytes / GIB:.1f} GiB, reserved {account.reserved_bytes / GIB:.1f} of "
        f"{account.capacity_bytes / GIB:.1f} GiB"
    )
    state = (
        f"state     {account.state_bytes / GIB:.1f} GiB of parameters, gradients and optimizer; an estimate of those "
        f"alone leaves out {omitted} GiB"
    )
    lines = [worst, f"memory    {verdict}", state]
    if account.observed_bytes is not None:
        error = account.reserved_bytes / account.observed_bytes - 1
        lines.append(
            f"observed  {account.observed_bytes / GIB:.1f} GiB, {(account.observed_bytes - account.state_bytes) / GIB:.1f} "
            f"GiB more than the state; predicted {error:+.1%} against it"
        )
    print_lines(console(), lines)


def answer_flip_text(flip: AnswerFlip) -> str:
    """Return a flip point of the answer as text."""
    scale, unit, digits = {"bytes": (GIB, " GiB", 1), "bytes_per_s": (1e9, " GB/s", 1)}.get(flip.unit, (1.0, "", 0))
    sign = ("<" if flip.wins == "below" else ">") if scale != 1.0 else "="
    return (
        f"{flip.quantity} {sign} {flip.at / scale:.{digits}f}{unit} (now {flip.now / scale:.{digits}f}): the answer "
        f"becomes {degrees_text(flip.becomes)}; {policy_text(flip.becomes)}"
    )


def print_comparison(found: Comparison) -> None:
    """Print the answer of `planner compare`."""
    screen = console()
    cases, estimates, terms = found.cases, found.estimates, found.terms
    names = [printable(case.id) for case in cases]
    print_lines(
        screen,
        [
            f"first     {names[0]}: {degrees_text(cases[0].plan)}; {policy_text(cases[0].plan)}",
            f"second    {names[1]}: {degrees_text(cases[1].plan)}; {policy_text(cases[1].plan)}",
            *(f"differs   {line}" for line in (*found.settings, *found.question)),
            "",
        ],
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("term", "first", "second", "difference"):
        table.add_column(heading, justify="left" if heading == "term" else "right")
    steps = [estimate.step_s.value for estimate in estimates]
    digits = min(decimals(step) for step in steps)
    for term in terms:
        if term.unit == "s" and max(abs(term.first), abs(term.second)) >= NOTHING_S:
            table.add_row(
                term.name, f"{term.first:.{digits}f} s", f"{term.second:.{digits}f} s", _change(term.delta, 0.0)
            )
    table.add_row(
        "step", f"{steps[0]:.{digits}f} s", f"{steps[1]:.{digits}f} s", _change(steps[1] - steps[0], steps[0])
    )
    rates = [estimate.tokens_per_s_per_gpu for estimate in estimates]
    table.add_row("tokens/s/GPU", f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[1] / rates[0] - 1:+.1%}")
    for term in terms:
        if term.unit == "bytes" and (term.first or term.second):
            table.add_row(
                term.name.replace("_", " "),
                f"{term.first / GIB:.2f} GiB",
                f"{term.second / GIB:.2f} GiB",
                f"{term.delta / GIB:+.2f} GiB" if abs(term.delta) >= NOTHING_BYTES else "-",
            )
    reserved = [estimate.memory.reserved_bytes / GIB for estimate in estimates]
    table.add_row(
        "reserved", f"{reserved[0]:.2f} GiB", f"{reserved[1]:.2f} GiB", f"{reserved[1] - reserved[0]:+.2f} GiB"
    )
    has = [estimate.memory.capacity_bytes / GIB for estimate in estimates]
    table.add_row(
        "of", f"{has[0]:.2f} GiB", f"{has[1]:.2f} GiB", "" if has[0] == has[1] else f"{has[1] - has[0]:+.2f} GiB"
    )
    table.add_row("fits", *(str(estimate.memory.fit) for estimate in estimates), "")
    one, other = found.traffic
    if one is not None and other is not None:
        for row in traffic_rows(one, other):
            table.add_row(*row)
    screen.print(table)


def _change(delta_s: float, of_s: float) -> str:
    """Return a difference in seconds, with its share of `of_s` if that is not 0; a dash for a rounding error."""
    if abs(delta_s) < NOTHING_S:
        return "-"
    return seconds(delta_s) + (f" ({delta_s / of_s:+.1%})" if of_s else "")
