"""What a calibration found, for people and as JSON: how many samples, how well the curves predict what they left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topology.cluster import Cluster
    from topology.profile import Profile


def document(found: Profile, whole: Profile, links: Cluster | None = None) -> dict[str, Any]:
    """Return the answer of `planner calibrate --json`."""
    from planner.output import SCHEMA_VERSION  # noqa: PLC0415 - keeps `--help` light
    from simulator.calibration_fit import fit_errors  # noqa: PLC0415 - as above
    from topology import codec  # noqa: PLC0415 - as above

    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": found.gpu,
        "driver": found.driver,
        "versions": found.versions,
        "measured": counts(found),
        "in_profile": counts(whole),
        "left_out_errors": codec.to_builtins(fit_errors(whole)),
        "overlap": overlap_rows(found),
        "overlap_errors": {mode: error for mode, (error, _) in _rate_errors(whole, links).items()},
        "missing": list(found.missing),
    }


def counts(profile: Profile) -> dict[str, int]:
    """Return how many valid samples of each kind there are, and how many were throttled."""
    throttled = sum(
        1
        for part in (profile.operators, profile.contention, profile.layers, profile.overlap)
        for sample in part
        if sample.invalid
    )
    return {
        "operators": sum(1 for sample in profile.operators if not sample.invalid),
        "host": len(profile.host),
        "contention": sum(1 for sample in profile.contention if not sample.invalid),
        "layers": sum(1 for sample in profile.layers if not sample.invalid),
        "overlap": sum(1 for sample in profile.overlap if not sample.invalid),
        "collectives": len(profile.collectives),
        "throttled": throttled,
    }


def overlap_rows(profile: Profile) -> list[dict[str, Any]]:
    """Return, for every product measured with its collective, the fastest mode and the share of the shorter part hidden."""
    rows = []
    for sample in profile.overlap:
        if sample.invalid or not sample.seconds:
            continue
        mode = min(sample.seconds, key=lambda name: sample.seconds[name])
        saved = sample.product_s + sample.collective_s - sample.seconds[mode]
        rows.append(
            {
                "operation": sample.operation,
                "ranks": sample.ranks,
                "rows": sample.rows,
                "columns": list(sample.columns),
                "depth": sample.depth,
                "product_s": sample.product_s,
                "collective_s": sample.collective_s,
                "seconds": sample.seconds,
                "fastest": mode,
                "hidden": max(0.0, min(1.0, saved / min(sample.product_s, sample.collective_s))),
            }
        )
    return rows


def _rate_errors(profile: Profile, links: Cluster | None) -> dict[str, tuple[float, int]]:
    from simulator.overlap_samples import rate_errors  # noqa: PLC0415 - keeps `--help` light

    return rate_errors(profile, links) if links is not None and profile.overlap else {}


def _overlap_lines(found: Profile, whole: Profile, links: Cluster | None) -> list[str]:
    rows = overlap_rows(found)
    out = ["fastest overlap mode, product and collective one after the other, what is hidden of the shorter:"] * bool(
        rows
    )
    for row in rows:
        kind = "gather" if row["operation"] == "all_gather_matmul" else "scatter"
        columns = "+".join(f"{width:,}" for width in row["columns"])
        shape = f"{kind} {row['rows']:,} x {columns} x {row['depth']:,} on {row['ranks']}"
        after = row["product_s"] + row["collective_s"]
        out.append(
            f"  {shape:<46} {row['fastest']:<15} {1e6 * row['seconds'][row['fastest']]:7,.0f} us"
            f"  {1e6 * after:7,.0f} us  {row['hidden']:4.0%}"
        )
    errors = _rate_errors(whole, links)
    if errors:
        said = ", ".join(f"{mode} {error:.1%}" for mode, (error, _) in errors.items())
        out.append(f"overlap rates fitted, mean absolute error: {said}")
    return out


def lines(found: Profile, whole: Profile, links: Cluster | None = None) -> list[str]:
    """Return the answer for people."""
    from simulator.calibration_fit import fit_errors  # noqa: PLC0415 - keeps `--help` light

    new, all_of = counts(found), counts(whole)
    said = ", ".join(f"{number} {kind}" for kind, number in new.items() if number)
    out = [f"measured  {said or 'nothing new'}"]
    if all_of != new:
        out.append(f"profile   {', '.join(f'{number} {kind}' for kind, number in all_of.items() if number)}")
    errors = fit_errors(whole)
    if errors:
        out.append("each sample left out in turn and predicted from the others, mean absolute error:")
        out += [f"  {one.what:<40} {one.samples:>5} samples  {one.mean_abs:6.1%}" for one in errors]
    out += _overlap_lines(found, whole, links)
    out += [f"missing   {what}" for what in found.missing]
    return out
