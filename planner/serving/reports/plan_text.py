"""One deployment as text: what clients would see, where the time goes, memory, changes of the answer, a comparison."""

from __future__ import annotations

from collections.abc import Mapping

from planner.io.grids import console, grid
from planner.io.printable import printable
from planner.serving.answer import ServingAnswer
from planner.serving.crossings import Sweep
from planner.serving.explain import ServingComparison, ServingExplanation
from planner.serving.reports.text import (
    answer_sentence,
    break_even_text,
    deployment_text,
    ms_text,
    print_memory,
    reasons_text,
)
from topology.units import two_digits

NAMES = {
    "attention_products": "attention's products",
    "feed_forward": "feed-forward products",
    "prompts_between": "prefill of other prompts in between",
    "outside": "HTTP, tokenizer, queue",
    "reading": "reading the prompt",
    "moving": "moving the cache",
    "launches": "exposed kernel launches",
    "host": "scheduler and sampling on the host",
    "attention": "attention over cached tokens",
    "all_reduce": "all-reduces",
    "head": "output scores and sampling",
    "draft": "drafting tokens",
    "power": "products held back by the power limit",
    "inputs": "inputs of a replayed step",
}


def words(name: str) -> str:
    """Return a part of an account as text."""
    return NAMES.get(name, name.replace("_", " "))


def print_answer(found: ServingAnswer) -> None:
    """Print the answer of `estimate --task serve`."""
    screen = console()
    if found.estimate is None or found.account is None:
        screen.print(printable(f"{deployment_text(found.deployment)} of {found.question.model.name} cannot run:"))
        for problem in found.problems:
            screen.print(printable(f"illegal   {problem}"))
    else:
        screen.print(printable(answer_sentence(found.question, found.deployment, found.estimate, meets=found.meets)))
        screen.print()
        _print_percentiles(found)
        _print_account(found)
        print_memory(found.question, found.estimate)
    if found.assumed:
        screen.print(printable(f"Assumed: {'; '.join(found.assumed)}."))
    if found.estimate is not None:
        screen.print("Times are from datasheets and published kernel rates; ranges hold four of five published points.")


def print_explained(found: ServingExplanation) -> None:
    """Print the answer of `explain --task serve`."""
    screen = console()
    print_answer(found.answer)
    if found.answer.estimate is not None:
        for one in found.break_even:
            screen.print(break_even_text(one))
    if found.runners_up:
        screen.print("\nOther deployments:")
        for plan in found.runners_up:
            estimate = plan.estimate
            why = plan.lost_because or "as good as any"
            figures = (
                f"{two_digits(estimate.ttft_s.value * 1e3)} ms, then {two_digits(estimate.tpot_s.value * 1e3)} ms"
                " per token"
            )
            screen.print(printable(f"  {deployment_text(plan.deployment)}: {figures}; {why}"))
    for sweep in found.sweeps:
        _print_sweep(sweep)
    if found.result.rejected:
        screen.print(printable(f"\nNot possible: {reasons_text(found.result.rejected)}."))


def print_compared(found: ServingComparison, names: tuple[str, str]) -> None:
    """Print the answer of `compare` of two serving plans."""
    screen = console()
    for place, name, answer in zip(("first", "second"), names, found.answers, strict=True):
        screen.print(
            printable(f"{place:8}{name}: {deployment_text(answer.deployment)} of {answer.question.model.name}")
        )
        for problem in answer.problems:
            screen.print(printable(f"illegal {problem}"))
    for line in (*found.settings, *found.question):
        screen.print(printable(f"differs {line}"))
    one, other = (answer.estimate for answer in found.answers)
    if one is None or other is None:
        return
    table = grid(("ms", "first", "second", "difference"), gap=2)
    for of, title in (("token", "a token"), ("first_token", "the first token")):
        terms = [term for term in found.terms if term.of == of]
        for term in sorted(terms, key=lambda term: -abs(term.delta)):
            if max(abs(term.first), abs(term.second)) >= 5e-6:
                cells = [two_digits(1e3 * value) for value in (term.first, term.second, term.delta)]
                table.add_row(f"  {words(term.name)}", *cells)
        sums = [sum(getattr(term, side) for term in terms) for side in ("first", "second", "delta")]
        table.add_row(title, *[two_digits(1e3 * value) for value in sums])
    rates = [estimate.output_tokens_per_s_per_gpu.value for estimate in (one, other)]
    table.add_row("tokens/s a GPU", *[two_digits(value) for value in (*rates, rates[1] - rates[0])])
    kept = [float(estimate.room.tokens) for estimate in (one, other)]
    table.add_row("tokens in the cache", *[f"{value:,.0f}" for value in (*kept, kept[1] - kept[0])])
    screen.print()
    screen.print(table)


def _print_percentiles(found: ServingAnswer) -> None:
    if found.estimate is None:
        return
    seen = found.estimate.latency
    table = grid(("ms", "mean", "range", "p50", "p95", "p99"), gap=2)
    rows = (
        ("first token", found.estimate.ttft_s, seen.ttft_s),
        ("a token after it", found.estimate.tpot_s, seen.tpot_s),
        ("whole answer", found.estimate.e2e_s, seen.e2e_s),
    )
    for name, value, spread in rows:
        mean, _, held = ms_text(value).partition(" ")
        table.add_row(
            name, mean, held.strip("()"), *[two_digits(1e3 * x) for x in (spread.p50, spread.p95, spread.p99)]
        )
    console().print(table)


def _print_account(found: ServingAnswer) -> None:
    if found.account is None:
        return
    account = found.account
    answers, context = two_digits(account.sequences), two_digits(account.context)
    console().print(f"\nOne token, in a step of {answers} answers with {context} tokens each:")
    _print_parts(account.token_s)
    console().print("\nThe first token:")
    _print_parts(account.first_s)
    console().print("\nPrefill of one prompt alone:")
    _print_parts(account.reading_s)


def _print_parts(parts: Mapping[str, float]) -> None:
    table = grid(("", "ms", "share"), gap=2)
    whole = sum(parts.values())
    for name, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        if abs(seconds) >= 0.005 * abs(whole):
            table.add_row(f"  {words(name)}", two_digits(1e3 * seconds), f"{seconds / whole:.0%}")
    console().print(table)


def _print_sweep(sweep: Sweep) -> None:
    scale, unit = (1e-9, "GB/s") if sweep.unit == "bytes/s" else (1.0, sweep.unit)
    heading = unit if unit == sweep.quantity else f"{sweep.quantity} {unit}"
    table = grid((heading, "best deployment", "1st token ms", "a token ms", "tok/s/GPU"), gap=2)
    for row in sweep.rows:
        estimate = row.estimate
        figures = [estimate.ttft_s.value * 1e3, estimate.tpot_s.value * 1e3, estimate.output_tokens_per_s_per_gpu.value]
        value = two_digits(row.value * scale) if scale != 1 else f"{row.value:,.0f}"
        table.add_row(value, deployment_text(row.deployment), *map(two_digits, figures))
    console().print()
    console().print(table)
    for one in sweep.crossings:
        below, above = deployment_text(one.below), deployment_text(one.above)
        console().print(printable(f"From about {two_digits(one.at * scale)} {unit}, {above} is better than {below}."))
