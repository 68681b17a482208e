"""The exceptions of this package. Each states what happened, `why`, and the `remedy` that a person can try."""

from __future__ import annotations

from topology.errors import (
    BadCluster,
    BadInput,
    BadModel,
    BadPlan,
    Infeasible,
    NewerSchema,
    OutOfTolerance,
    PlannerError,
    ProbeError,
    Stale,
    UserError,
)

__all__ = [
    "BadCluster",
    "BadInput",
    "BadModel",
    "BadPlan",
    "Infeasible",
    "NewerSchema",
    "OutOfTolerance",
    "PlannerError",
    "ProbeError",
    "Stale",
    "UserError",
]
