"""Explanations and comparisons as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from planner.flips import GIB, seconds
from planner.headroom import room_text
from planner.output import console, printable
from planner.tables import (
    arithmetic,
    cluster_line,
    flip_text,
    model_line,
    policy,
    runtime_line,
    say,
    workload_line,
)
from planner.waterfall import Difference, Waterfall
from simulator.estimate import Estimate
from simulator.overlap_sites import NONE

if TYPE_CHECKING:
    from planner.cases import Case
    from planner.explain import AnswerFlip, Explanation, MemoryAccount
    from planner.overlap_account import SiteOverlap
    from planner.search import SearchResult

BAR = 24  # characters of the longest bar
NOTHING_S = 1e-7  # differences below are rounding


def print_explanation(found: Explanation, result: SearchResult) -> None:
    """Print the answer of `planner explain`."""
    screen = console()
    behind = f"; {seconds(found.behind_s)} a step against the best plan" if found.behind_s else "; the best plan"
    say(
        screen,
        [
            f"cluster   {cluster_line(result.cluster)}",
            f"model     {model_line(result.model)}",
            f"workload  {workload_line(result.workload)}",
            f"runtime   {runtime_line(result.runtime, result.framework.title)}",
            f"plan      {arithmetic(found.plan)}; {policy(found.plan)}{behind}",
            "",
        ],
    )
    print_waterfall(found.waterfall)
    screen.print()
    print_memory(found.memory)
    lines = [
        f"memory    {room_text(found.estimate, found.room)}",
        "",
        *(f"overlap   {overlap_text(site)}" for site in found.overlap),
    ]
    for number, runner in enumerate(found.runners, start=2):
        flips = "; ".join(flip_text(flip) for flip in runner.flips)
        lines.append(
            f"#{number}        {arithmetic(runner.plan)}; {policy(runner.plan)}: {runner.lost_because}"
            + (f"; {flips}" if flips else "")
        )
    lines += [f"flip      {answer_flip_text(flip)}" for flip in found.flips]
    counts = ", ".join(f"{name} {count:,}" for name, count in found.rejected.items() if count)
    lines += [f"rejected  {counts}"] if counts else []
    say(screen, lines)


def overlap_text(found: SiteOverlap) -> str:
    """Return what the overlap at one communication is worth."""
    if found.mode == NONE:
        return f"{found.site}: none"
    gains = "shortens" if found.saves_s >= 0 else "lengthens"
    return f"{found.site}: {found.mode} hides {seconds(found.hides_s)} and {gains} the step by {seconds(abs(found.saves_s))}"


def print_waterfall(fall: Waterfall) -> None:
    """Print the fall from the peak of the GPU to the achieved step, a bar for each term."""
    table = Table(box=None, pad_edge=False)
    table.add_column("from peak to achieved")
    table.add_column("s", justify="right")
    table.add_column("of the step", justify="right")
    table.add_column("")
    peak = f"model FLOPs at {fall.peak_flops / 1e12:.0f} TFLOP/s"
    table.add_row(peak, f"{fall.peak_s:.4g}", f"{fall.peak_s / fall.step_s:.1%} (MFU)", _bar(fall.peak_s, fall.step_s))
    for term in fall.terms:
        table.add_row(term.name, f"{term.seconds:+.4g}", f"{term.share:.1%}", _bar(term.seconds, fall.step_s))
    table.add_row("achieved", f"{fall.step_s:.4g}", "100.0%", "")
    console().print(table)
    say(console(), [f"most      {fall.top_loss.name}: {fall.top_loss.meaning}"])


def _bar(value: float, whole: float) -> str:
    return "#" * max(0, round(BAR * value / whole)) if whole else ""


def print_memory(account: MemoryAccount) -> None:
    """Print bytes by category and stage, and what an estimate of state alone would leave out."""
    stages = sorted({row.stage for row in account.rows})
    shown = stages if len(stages) <= 8 else sorted({*stages[:3], account.worst_stage, *stages[-2:]})
    table = Table(box=None, pad_edge=False)
    table.add_column("GiB by stage")
    for stage in shown:
        table.add_column(f"{stage}{'*' if stage == account.worst_stage else ''}", justify="right")
    for category in dict.fromkeys(row.category for row in account.rows):
        here = {row.stage: row.nbytes for row in account.rows if row.category == category}
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
    lines = [worst, state]
    if account.observed_bytes is not None:
        error = account.reserved_bytes / account.observed_bytes - 1
        lines.append(
            f"observed  {account.observed_bytes / GIB:.1f} GiB, {(account.observed_bytes - account.state_bytes) / GIB:.1f} "
            f"GiB more than the state; predicted {error:+.1%} against it"
        )
    say(console(), lines)


def answer_flip_text(flip: AnswerFlip) -> str:
    """Return a flip of the answer as a sentence."""
    scale, unit, digits = {"bytes": (GIB, " GiB", 1), "bytes_per_s": (1e9, " GB/s", 1)}.get(flip.unit, (1.0, "", 0))
    sign = ("<" if flip.wins == "below" else ">") if scale != 1.0 else "="
    return (
        f"{flip.quantity} {sign} {flip.at / scale:.{digits}f}{unit} (now {flip.now / scale:.{digits}f}): the answer "
        f"becomes {arithmetic(flip.becomes)}; {policy(flip.becomes)}"
    )


def print_comparison(
    cases: Sequence[Case],
    estimates: Sequence[Estimate],
    terms: Sequence[Difference],
    settings: Sequence[str],
    question: Sequence[str],
) -> None:
    """Print the answer of `planner compare`."""
    screen = console()
    names = [printable(case.id) for case in cases]
    say(
        screen,
        [
            f"first     {names[0]}: {arithmetic(cases[0].plan)}; {policy(cases[0].plan)}",
            f"second    {names[1]}: {arithmetic(cases[1].plan)}; {policy(cases[1].plan)}",
            *(f"differs   {line}" for line in (*settings, *question)),
            "",
        ],
    )
    table = Table(box=None, pad_edge=False)
    for heading in ("term", "first", "second", "difference"):
        table.add_column(heading, justify="left" if heading == "term" else "right")
    steps = [estimate.step_s.value for estimate in estimates]
    for term in terms:
        if term.unit == "s":
            delta = seconds(term.delta) if abs(term.delta) >= NOTHING_S else "-"
            table.add_row(term.name, f"{term.first:.4g} s", f"{term.second:.4g} s", delta)
    table.add_row("step", f"{steps[0]:.4g} s", f"{steps[1]:.4g} s", seconds(steps[1] - steps[0]))
    for term in terms:
        if term.unit == "bytes":
            table.add_row(
                term.name.replace("_", " "),
                f"{term.first / GIB:.2f} GiB",
                f"{term.second / GIB:.2f} GiB",
                f"{term.delta / GIB:+.2f} GiB",
            )
    reserved = [estimate.memory.reserved_bytes / GIB for estimate in estimates]
    table.add_row(
        "reserved", f"{reserved[0]:.2f} GiB", f"{reserved[1]:.2f} GiB", f"{reserved[1] - reserved[0]:+.2f} GiB"
    )
    screen.print(table)
