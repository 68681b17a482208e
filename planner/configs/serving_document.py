"""The JSON document of a serving command that was checked."""

from __future__ import annotations

from planner.configs.serving import VERSIONS, CheckedServing
from planner.io.output import SCHEMA_VERSION
from planner.serving.reports.documents import estimate_document, listed_document
from topology.codec import JsonObject


def checked_serving_document(where: str, checked: CheckedServing) -> JsonObject:
    """Return the JSON document of `planner check` on a command that starts an engine."""
    found = checked.answer
    answer = None if found is None else estimate_document(where, found)
    changes = (
        []
        if found is None
        else [
            {
                "what": one.what,
                "diff": one.diff,
                "step_s": one.plan.estimate.tpot_s.value,
                "fits": one.plan.estimate.room.fits,
                **listed_document(rank, one.plan, found.question),
            }
            for rank, one in enumerate(checked.changes, 1)
        ]
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "task": "serve",
        "framework": checked.engine,
        "version": VERSIONS[checked.engine],
        "legal": checked.legal,
        "problems": [{"grade": "illegal", "message": message} for message in checked.problems],
        "unknown": list(checked.unknown),
        "assumed": list(checked.assumed),
        "model": None if found is None else found.question.model.name,
        "cluster": None if found is None else found.question.cluster.name,
        "plan": None if answer is None else answer["plan"],
        "estimate": None if answer is None else answer["estimate"],
        "changes": changes,
        "best": changes[0] if changes else None,
        "no_better": checked.no_better,
    }
