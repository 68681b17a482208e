"""Errors of a service and its jobs. Needs no HTTP client."""

from __future__ import annotations

from topology.codec import JsonObject
from topology.errors import Infeasible, PlannerError, UserError

ENDED = frozenset({"done", "failed", "cancelled"})


class ServiceError(PlannerError):
    """The service refused, or does not answer. `status` is that of its answer, 0 where there was none."""

    status = 0


def error_of(document: JsonObject) -> PlannerError:
    """Return the error of a job that was not completed, as its command would have raised it."""
    error = document["error"] or {"message": f"the job was {document['state']}"}
    kinds: dict[int | None, type[PlannerError]] = {2: UserError, 3: Infeasible}
    kind = kinds.get(document["exit_code"], PlannerError)
    return kind(error["message"], why=error.get("why", ""), remedy=error.get("remedy", ""))
