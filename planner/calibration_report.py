"""What a calibration found, for people and as JSON: how many samples, how well the curves predict what they left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from topology.profile import Profile


def document(found: Profile, whole: Profile) -> dict[str, Any]:
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
        "missing": list(found.missing),
    }


def counts(profile: Profile) -> dict[str, int]:
    """Return how many valid samples of each kind there are, and how many were throttled."""
    throttled = sum(
        1 for part in (profile.operators, profile.contention, profile.layers) for sample in part if sample.invalid
    )
    return {
        "operators": sum(1 for sample in profile.operators if not sample.invalid),
        "host": len(profile.host),
        "contention": sum(1 for sample in profile.contention if not sample.invalid),
        "layers": sum(1 for sample in profile.layers if not sample.invalid),
        "collectives": len(profile.collectives),
        "throttled": throttled,
    }


def lines(found: Profile, whole: Profile) -> list[str]:
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
    out += [f"missing   {what}" for what in found.missing]
    return out
