"""Report a calibration as text and JSON: numbers of samples, and leave-one-out errors of the fitted curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.io.output import SCHEMA_VERSION
from simulator.fitting.calibration_fit import fit_errors, rate_errors
from topology import codec
from topology.cluster import Cluster
from topology.profile.profile import Profile


def document(found: Profile, merged: Profile, links: Cluster | None = None) -> codec.JsonObject:
    """Return the answer of `planner calibrate --json`.

    `found` has the new measurements, `merged` is the resulting profile.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": found.gpu,
        "driver": found.driver,
        "versions": found.versions,
        "measured": counts(found),
        "in_profile": counts(merged),
        "left_out_errors": codec.to_builtins(fit_errors(merged)),
        "overlap": codec.to_builtins(overlap_rows(found)),
        "overlap_errors": {mode: error for mode, (error, _) in _rate_errors(merged, links).items()},
        "missing": list(found.missing),
    }


def counts(profile: Profile) -> dict[str, int]:
    """Return the number of valid samples of each kind, and of throttled ones."""
    lists = profile.sample_lists()
    valid = {name: sum(not getattr(sample, "invalid", "") for sample in samples) for name, samples in lists.items()}
    return {**valid, "throttled": sum(map(len, lists.values())) - sum(valid.values())}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapRow:
    """A measured product with its collective: the fastest mode, and the share of the shorter of the two it hides."""

    operation: str
    ranks: int
    rows: int
    columns: tuple[int, ...]
    depth: int
    product_s: float
    collective_s: float
    seconds: Mapping[str, float]
    fastest: str
    hidden: float


def overlap_rows(profile: Profile) -> list[OverlapRow]:
    """Return the overlap measurements, one row for each product with its collective."""
    rows = []
    for sample in profile.overlap:
        if sample.invalid or not sample.seconds:
            continue
        mode = min(sample.seconds, key=lambda name: sample.seconds[name])
        saved = sample.product_s + sample.collective_s - sample.seconds[mode]
        rows.append(
            OverlapRow(
                operation=sample.operation,
                ranks=sample.ranks,
                rows=sample.rows,
                columns=tuple(sample.columns),
                depth=sample.depth,
                product_s=sample.product_s,
                collective_s=sample.collective_s,
                seconds=sample.seconds,
                fastest=mode,
                hidden=max(0.0, min(1.0, saved / min(sample.product_s, sample.collective_s))),
            )
        )
    return rows


def _rate_errors(profile: Profile, links: Cluster | None) -> dict[str, tuple[float, int]]:
    return rate_errors(profile, links) if links is not None and profile.overlap else {}


def _overlap_lines(found: Profile, merged: Profile, links: Cluster | None) -> list[str]:
    rows = overlap_rows(found)
    out = ["fastest overlap mode, product and collective one after the other, what is hidden of the shorter:"] * bool(
        rows
    )
    for row in rows:
        kind = "gather" if row.operation == "all_gather_matmul" else "scatter"
        columns = "+".join(f"{width:,}" for width in row.columns)
        shape = f"{kind} {row.rows:,} x {columns} x {row.depth:,} on {row.ranks}"
        after = row.product_s + row.collective_s
        out.append(
            f"  {shape:<46} {row.fastest:<15} {1e6 * row.seconds[row.fastest]:7,.0f} us"
            f"  {1e6 * after:7,.0f} us  {row.hidden:4.0%}"
        )
    errors = _rate_errors(merged, links)
    if errors:
        error_text = ", ".join(f"{mode} {error:.1%}" for mode, (error, _) in errors.items())
        out.append(f"overlap rates fitted, mean absolute error: {error_text}")
    return out


def lines(found: Profile, merged: Profile, links: Cluster | None = None) -> Iterator[str]:
    """Return the answer of `planner calibrate` as lines of text."""
    new, total = counts(found), counts(merged)
    measured = ", ".join(f"{number} {kind}" for kind, number in new.items() if number)
    yield f"measured  {measured or 'nothing new'}"
    if total != new:
        yield f"profile   {', '.join(f'{number} {kind}' for kind, number in total.items() if number)}"
    errors = fit_errors(merged)
    if errors:
        yield "each sample left out in turn and predicted from the others, mean absolute error:"
        yield from (f"  {one.what:<40} {one.samples:>5} samples  {one.mean_abs:6.1%}" for one in errors)
    yield from _overlap_lines(found, merged, links)
    yield from (f"missing   {what}" for what in found.missing)
