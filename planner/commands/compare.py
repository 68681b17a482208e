"""`planner compare`: two plans, term by term."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from planner.commands import options


def compare(
    first: Annotated[str, typer.Argument(help="Plan file of suggest --out, or a case.")],
    second: Annotated[str, typer.Argument(help="Another, of the same question or a different one.")],
    profile: options.Profile = None,
    json: options.Json = False,
) -> None:
    """Compare two plans term by term: seconds of the step, bytes of the worst rank, and what the plans set differently.

    Terms add up to the difference of the two steps. Where the plans are for different questions that is said.
    """
    from planner import output  # noqa: PLC0415 - keeps `--help` light
    from planner.cases import case_of_file  # noqa: PLC0415 - as above
    from planner.costs import cost_table  # noqa: PLC0415 - as above
    from planner.inputs import profile_of  # noqa: PLC0415 - as above
    from planner.plan_file import differences  # noqa: PLC0415 - as above
    from planner.waterfall import difference  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above

    measured = profile_of(profile)
    cases = [case_of_file(name) for name in (first, second)]
    estimates = [
        cost_table(case.model, case.cluster, case.workload, [case.plan], case.runtime, measured).estimate(0)
        for case in cases
    ]
    terms = difference(*estimates)
    settings = differences(cases[0].plan, cases[1].plan)
    question: list[str] = [
        f"{name}: {line}"
        for name in ("model", "cluster", "workload", "runtime")
        for line in differences(getattr(cases[0], name), getattr(cases[1], name))
    ]
    if not json:
        from planner.explain_text import print_comparison  # noqa: PLC0415 - as above

        print_comparison(cases, estimates, terms, settings, question)
        return
    sides = [
        {
            "file": file,
            "plan": codec.to_builtins(case.plan),
            "step_s": estimate.step_s.value,
            "fits": estimate.memory.fits,
            "fit": estimate.memory.fit,
        }
        for file, case, estimate in zip((first, second), cases, estimates, strict=True)
    ]
    document: dict[str, Any] = {
        "schema_version": output.SCHEMA_VERSION,
        "first": sides[0],
        "second": sides[1],
        "step_s": estimates[1].step_s.value - estimates[0].step_s.value,
        "reserved_bytes": estimates[1].memory.reserved_bytes - estimates[0].memory.reserved_bytes,
        "terms": [{**codec.to_builtins(term), "delta": term.delta} for term in terms],
        "settings": settings,
        "question": question,
    }
    output.emit_json(document)
