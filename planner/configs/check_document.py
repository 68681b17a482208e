"""The JSON document of a configuration that was checked."""

from __future__ import annotations

from planner.configs.answer import Checked
from planner.configs.formats.configuration import did_you_mean
from planner.io.output import SCHEMA_VERSION
from topology import codec
from topology.codec import JsonObject


def check_document(checked: Checked) -> JsonObject:
    """Return the JSON document of `planner check`."""
    found, best, stated = checked.found, checked.best, checked.stated
    question = None if found is None else found.case.question
    plan = found.case.plan if found is not None else stated.plan if stated is not None else None
    said = question if question is not None else stated
    return {
        "schema_version": SCHEMA_VERSION,
        "framework": checked.configuration.framework,
        "version": checked.configuration.version,
        "legal": checked.legal,
        "problems": codec.to_builtins(checked.problems),
        "unknown": list(checked.configuration.unknown),
        "did_you_mean": did_you_mean(checked.configuration),
        "questions": codec.to_builtins(checked.questions),
        "assumed": list(checked.assumed),
        "plan": None if plan is None else codec.to_builtins(plan),
        "workload": None if said is None else codec.to_builtins(said.workload),
        "runtime": None if said is None else codec.to_builtins(said.runtime),
        "model": None if question is None else question.model.name,
        "cluster": None if said is None else said.cluster.name,
        "estimate": None if found is None or found.estimate is None else codec.to_builtins(found.estimate),
        "measured": None if checked.against is None else codec.to_builtins(checked.against),
        "changes": [
            {
                "what": one.what,
                "diff": one.diff,
                "step_s": one.step_s,
                "fits": one.fits,
                "fit_probability": one.fit_probability,
            }
            for one in checked.changes
        ],
        "best": None if best is None else codec.to_builtins(best),
        "best_because": checked.best_because,
        "no_better": checked.no_better,
    }
