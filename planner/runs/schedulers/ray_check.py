"""Check that Ray has what a job needs: from what its nodes declare, and from a short job on them.

Source: Ray's documentation, "Ray Jobs REST API" and the state API (/api/v0/nodes).
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from planner.runs.schedulers.node_answers import (
    INFO,
    NODE_CHECK,
    WARNING,
    Checked,
    answers_in,
    error,
    judge_nodes,
    worst_first,
)
from planner.runs.schedulers.ray import OVER, ask, job_log
from planner.runs.schedulers.scheduler import last_line
from topology import codec
from topology.errors import PlannerError

ROOM_S, CHECK_S, POLL_S = 30, 120.0, 1.0


def check_ray(nodes: int, gpus_per_node: int | None, *, folder: Path, python: str = "python3") -> list[Checked]:
    """Return the checks, faults first. Without `gpus_per_node` a job requests as many as nodes declare."""
    try:
        version = ask("GET", "/api/version")
        listed = ask("GET", "/api/v0/nodes")
    except PlannerError as away:
        return [error("controller", away.what, away.why, away.remedy)]
    alive = [one for one in _rows(listed) if one.get("state") == "ALIVE"]
    declared = [int(one["resources_total"].get("GPU", 0)) for one in alive]
    gpus = max(declared, default=0) if gpus_per_node is None else gpus_per_node
    able = sum(has >= gpus for has in declared)
    what = f"{able} nodes of Ray {version.get('ray_version', '?')} with {gpus} GPUs are up, {nodes} are needed"
    if able < nodes:
        why = ", ".join(f"{one.get('node_ip')} has {has}" for one, has in zip(alive, declared, strict=True))
        return [error("gpus", what, why, "--gpus-per-node, --nodes; or ray start on more nodes")]
    found = [Checked(code="nodes", severity=INFO, what=what)]
    try:
        found += _look_at_nodes(nodes, gpus, folder=folder, python=python)
    except PlannerError as refused:
        found.append(error("job", refused.what, refused.why, refused.remedy))
    return worst_first(found)


def _rows(document: Any) -> list[Any]:
    """Return the nodes in an answer of the state API."""
    found = document
    for name in ("data", "result", "result"):
        found = found.get(name) if isinstance(found, dict) else None
    rows = found if isinstance(found, list) else []
    return [one for one in rows if isinstance(one, dict) and isinstance(one.get("resources_total"), dict)]


def _look_at_nodes(nodes: int, gpus: int, *, folder: Path, python: str) -> list[Checked]:
    """Run the check on nodes that are free now. Raises PlannerError."""
    token = folder / f".meshwright-{secrets.token_hex(8)}"
    codec.write_text(token, "\n")
    job = f"meshwright-doctor-{secrets.token_hex(4)}"
    own: Sequence[str] = (python, "-m", NODE_CHECK, f"--file={token}")
    runner = (python, "-m", "executor.launch.ray_nodes", f"--nodes={nodes}", f"--gpus-per-node={gpus}")
    words = [*runner, f"--room={ROOM_S}", "--names", "--meet", "--", *own]
    try:
        ask("POST", "/api/jobs/", {"entrypoint": shlex.join(words), "submission_id": job})
        word, ends = "", time.monotonic() + CHECK_S
        while word not in OVER and time.monotonic() < ends:
            time.sleep(POLL_S)
            word = str(ask("GET", f"/api/jobs/{quote(job)}").get("status"))
        printed = job_log(job)
    finally:
        token.unlink(missing_ok=True)
        with contextlib.suppress(PlannerError):
            ask("POST", f"/api/jobs/{quote(job)}/stop")
    answers = answers_in(printed)
    if answers:
        return judge_nodes(answers, nodes, gpus)
    if word not in OVER:
        return [error("job", f"a job of {nodes} nodes did not end within {CHECK_S:.0f} s", "", "ray job list")]
    if "Ray found no" in printed:
        return [Checked(code="busy", severity=WARNING, what=last_line(printed), remedy="ask again")]
    remedy = f"{python} with meshwright, torch and ray must start on every node: ray start in their environment"
    return [error("python", "the check did not run on any node", last_line(printed), remedy)]
