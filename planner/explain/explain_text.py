"""Explanations and comparisons as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.explain.answer_text import fits_text, question_lines
from planner.explain.compare_plans import Comparison
from planner.explain.explain import AnswerFlip, Explanation, MemoryAccount, SiteOverlap
from planner.explain.tables import (
    changed_lines,
    flip_text,
    paged_text,
    print_lines,
    vendor_text,
)
from planner.explain.traffic import LINKS, NETWORK, LinkTraffic, Traffic
from planner.explain.waterfall import Waterfall
from planner.io.figures import change_text, gib_text, last_digit_s, rate_text, seconds_text
from planner.io.grids import console, grid
from planner.io.plan_words import degrees_text, policy_text
from planner.io.printable import printable
from planner.question.question import Question
from planner.search.fixes import memory_text
from planner.search.rule_words import rejected_words
from simulator.config.overlap_sites import NONE
from topology.cluster import Cluster
from topology.units import GIB, in_gib

BAR = 24  # characters of the longest bar
NOTHING_BYTES = 0.05 * GIB  # differences below would be shown as 0.0


def print_explanation(
    found: Explanation, question: Question, changed: Sequence[str] = (), left_out: str | None = None
) -> None:
    """Print the answer of `planner explain`; `left_out` says what there was no time for."""
    screen = console()
    last_s = last_digit_s(found.estimate.step_s)
    comparison = "; no plan fits" if found.none_fits else "; the best plan"
    if found.behind_s:
        comparison = f"; {seconds_text(found.behind_s, last_s, signed=True)} a step against the best plan"
    print_lines(
        screen,
        [
            *question_lines(question),
            f"plan      {degrees_text(found.plan)}; {policy_text(found.plan)}{comparison}",
            *changed_lines(changed),
            "",
        ],
    )
    print_waterfall(found.waterfall, last_s)
    screen.print()
    print_memory(found.memory, memory_text(found.estimate, found.fixes, found.plan.gpus))
    if found.traffic is not None:
        screen.print()
        print_traffic(found.traffic, question.cluster)
    lines = ["", *(f"overlap   {overlap_text(site, last_s)}" for site in found.overlap)]
    lines += [f"others    {found.none_fits}"] if found.none_fits else []
    lines += [f"left out  {left_out}"] if left_out else []
    cluster = question.cluster
    for number, runner in enumerate(found.runners, start=2):
        flips = "; ".join(vendor_text(flip_text(flip), cluster) for flip in runner.flips)
        lines.append(
            f"#{number}        {degrees_text(runner.plan)}; {policy_text(runner.plan)}: {runner.lost_because}"
            + (f"; {flips}" if flips else "")
        )
    lines += [f"flip      {vendor_text(answer_flip_text(flip), cluster)}" for flip in found.flips]
    counts = "; ".join(f"{why}: {count:,}" for why, count in rejected_words(found.rejected).items() if count)
    lines += [f"rejected  {counts}"] if counts else []
    print_lines(screen, lines)


def overlap_text(found: SiteOverlap, last_s: float) -> str:
    """Return a line on the overlap at one communication."""
    if found.mode == NONE:
        return f"{found.site}: none"
    gains = "shortens" if found.saves_s >= 0 else "lengthens"
    return (
        f"{found.site}: {found.mode} hides {seconds_text(found.hides_s, last_s)} and {gains} the step by"
        f" {seconds_text(abs(found.saves_s), last_s)}"
    )


def print_waterfall(found: Waterfall, last_s: float) -> None:
    """Print the waterfall from the GPU's peak to the achieved step, a bar for each term.

    `last_s` is the last known digit of the step; terms below it are combined.
    """
    table = grid(("from peak to achieved", "time", "of the step", ""), text=("from peak to achieved", ""), gap=2)

    def add(name: str, seconds: float, share: str, *, signed: bool = True) -> None:
        table.add_row(name, seconds_text(seconds, last_s, signed=signed), share, _bar(seconds, found.step_s))

    peak = f"model FLOPs at {found.peak_flops / 1e12:.0f} TFLOP/s"
    add(peak, found.peak_s, f"{found.peak_s / found.step_s:.0%} (MFU)", signed=False)
    small = [term for term in found.terms if abs(term.seconds) < last_s / 2]
    for term in found.terms:
        if term not in small:
            add(term.name, term.seconds, f"{term.share:.0%}")
    if small:
        rest = sum(term.seconds for term in small)
        add(", ".join(term.name for term in small), rest, f"{rest / found.step_s:.1%}")
    table.add_row("achieved", seconds_text(found.step_s, last_s), "100%", "")
    console().print(table)
    print_lines(console(), [f"most      {found.top_loss.name}: {found.top_loss.meaning}"])


def _bar(value: float, whole: float) -> str:
    return "#" * max(0, round(BAR * value / whole)) if whole else ""


def print_memory(account: MemoryAccount, verdict: str) -> None:
    """Print bytes by category and stage, what an estimate of model state alone leaves out, and whether they fit."""
    stages = sorted({row.stage for row in account.rows})
    shown = stages if len(stages) <= 8 else sorted({*stages[:3], account.worst_stage, *stages[-2:]})
    heads = [f"{stage}{'*' if stage == account.worst_stage else ''}" for stage in shown]
    table = grid(("GiB by stage", *heads), gap=2)
    for category in dict.fromkeys(row.category for row in account.rows):
        here = {row.stage: row.nbytes for row in account.rows if row.category == category}
        if not any(here.values()):
            continue
        table.add_row(category.replace("_", " "), *(f"{here.get(stage, 0.0) / GIB:.1f}" for stage in shown))
    console().print(table)
    omitted = ", ".join(f"{name.replace('_', ' ')} {gib_text(nbytes)}" for name, nbytes in account.omitted)
    worst = (
        f"worst     stage {account.worst_stage}, rank {account.worst_rank}: allocated "
        f"{gib_text(account.allocated_bytes)} GiB, reserved {gib_text(account.reserved_bytes)} of "
        f"{gib_text(account.capacity_bytes)} GiB"
    )
    state = (
        f"state     {gib_text(account.state_bytes)} GiB of parameters, gradients and optimizer; an estimate of those "
        f"alone leaves out {omitted} GiB"
    )
    if account.paged is not None:
        state = (
            f"state     {gib_text(account.state_bytes)} GiB of parameters, gradients and optimizer;"
            f" {paged_text(account.paged)}"
        )
    elif account.host_bytes:
        state = (
            f"host      {gib_text(account.host_bytes)} GiB of state in host memory for each GPU; on it {omitted} GiB"
        )
    lines = [worst, f"memory    {verdict}", state]
    if account.observed_bytes is not None:
        error = account.reserved_bytes / account.observed_bytes - 1
        lines.append(
            f"observed  {in_gib(account.observed_bytes)}, {(account.observed_bytes - account.state_bytes) / GIB:.1f} "
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
    table = grid(("term", "first", "second", "difference"), gap=2)
    steps = [estimate.step_s.value for estimate in estimates]
    last_s = min(last_digit_s(estimate.step_s) for estimate in estimates)

    def add(name: str, first: float, second: float, of_s: float = 0.0) -> None:
        delta = seconds_text(second - first, last_s, signed=True) if abs(second - first) >= last_s / 2 else "-"
        change = f" ({change_text((second - first) / of_s)})" if of_s else ""
        table.add_row(name, seconds_text(first, last_s), seconds_text(second, last_s), delta + change)

    for term in terms:
        if term.unit == "s" and max(abs(term.first), abs(term.second)) >= last_s / 2:
            add(term.name, term.first, term.second)
    add("step", steps[0], steps[1], of_s=steps[0])
    rates = [estimate.tokens_per_s_per_gpu for estimate in estimates]
    table.add_row(
        "tokens/s/GPU", *(rate_text(estimate) for estimate in estimates), change_text(rates[1] / rates[0] - 1)
    )
    for term in terms:
        if term.unit == "bytes" and (term.first or term.second):
            table.add_row(
                term.name.replace("_", " "),
                f"{gib_text(term.first)} GiB",
                f"{gib_text(term.second)} GiB",
                _gib_change(term.delta),
            )
    for name, sizes in (
        ("reserved", [estimate.memory.reserved_bytes for estimate in estimates]),
        ("usable memory", [estimate.memory.capacity_bytes for estimate in estimates]),
    ):
        table.add_row(name, *(f"{gib_text(size)} GiB" for size in sizes), _gib_change(sizes[1] - sizes[0]))
    table.add_row("fits", *(fits_text(estimate) for estimate in estimates), "")
    one, other = found.traffic
    if one is not None and other is not None:
        for name, *cells in traffic_rows(one, other):
            table.add_row(vendor_text(name, found.cases[0].question.cluster), *cells)
    screen.print(table)


def _gib_change(nbytes: float) -> str:
    return f"{nbytes / GIB:+.1f} GiB" if abs(nbytes) >= NOTHING_BYTES else "-"


# --- bytes that GPUs send ---------------------------------------------------------------------------------------------


TITLES = {"nvlink": "NVLink", "pcie": "PCIe", "network": "network"}
SHOWN = 1e-4  # share of all bytes; an axis with fewer only sums single numbers


def print_traffic(found: Traffic, cluster: Cluster) -> None:
    """Print the bytes that a GPU sends in a step, axis by axis, and what crosses each kind of link."""
    if not found.links:
        return
    used = [link.link for link in found.links]
    titles = {link: vendor_text(TITLES[link], cluster) for link in used}
    table = grid(("GB sent by a GPU", "ranks", "on a node", *titles.values()), gap=2)
    everything = sum(axis.sent_bytes for axis in found.axes)
    for axis in found.axes:
        if axis.sent_bytes >= SHOWN * everything:
            cells = (_gigabytes(getattr(axis, f"{link}_bytes")) for link in used)
            table.add_row(axis.axis, str(axis.ranks), str(axis.ranks_per_node), *cells)
    screen = console()
    screen.print(table)
    print_lines(screen, [f"{titles[link.link]:<10}{link_text(link)}" for link in found.links])


def link_text(link: LinkTraffic) -> str:
    """Return a sentence on the bytes that cross one kind of link."""
    crossing = f", {_gigabytes(link.total_bytes)} GB cross between nodes in all" if link.link == NETWORK else ""
    port = "its share of the NICs" if link.link == NETWORK else "its port"
    if not link.bytes_per_s:
        return f"{_gigabytes(link.busiest_bytes)} GB from the busiest GPU a step{crossing}"
    return (
        f"{_gigabytes(link.busiest_bytes)} GB from the busiest GPU a step: {link.busy_share:.1%} of the step at "
        f"{link.bytes_per_s / 1e9:.4g} GB/s ({port}, datasheet){crossing}"
    )


def traffic_rows(first: Traffic, second: Traffic) -> Iterator[tuple[str, ...]]:
    """Return rows of a comparison: bytes per GPU by link, and the share of the step that they take."""
    for name in LINKS:
        one, other = ({link.link: link for link in found.links}.get(name) for found in (first, second))
        if one is None and other is None:
            continue
        sent = [link.mean_bytes if link else 0.0 for link in (one, other)]
        busy = [link.busy_share if link else 0.0 for link in (one, other)]
        cells = [f"{_gigabytes(nbytes)} GB" for nbytes in sent]
        yield (f"sent, {TITLES[name]}", *cells, f"{_gigabytes(sent[1] - sent[0], '+')} GB")
        yield (f"{TITLES[name]} busy", *(f"{share:.1%}" for share in busy), f"{100 * (busy[1] - busy[0]):+.1f} points")


def _gigabytes(nbytes: float, sign: str = "") -> str:
    value = nbytes / 1e9
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.3g}"
