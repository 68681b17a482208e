"""The JSON document of a configuration that was checked."""

from __future__ import annotations

from planner.configs.answer import Checked
from planner.io.output import SCHEMA_VERSION
from topology import codec
from topology.codec import JsonObject


def check_document(checked: Checked) -> JsonObject:
    """Return the JSON document of `planner check`."""
    found, best = checked.found, checked.best
    return {
        "schema_version": SCHEMA_VERSION,
        "framework": checked.configuration.framework,
        "version": checked.configuration.version,
        "legal": checked.legal,
        "problems": codec.to_builtins(checked.problems),
        "unknown": list(checked.configuration.unknown),
        "assumed": list(checked.assumed),
        "plan": None if found is None else codec.to_builtins(found.case.plan),
        "workload": None if found is None else codec.to_builtins(found.case.question.workload),
        "runtime": None if found is None else codec.to_builtins(found.case.question.runtime),
        "model": None if found is None else found.case.question.model.name,
        "cluster": None if found is None else found.case.question.cluster.name,
        "estimate": None if found is None or found.estimate is None else codec.to_builtins(found.estimate),
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
        "no_better": checked.no_better,
    }
