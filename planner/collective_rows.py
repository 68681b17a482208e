"""The rows of `planner collective`: predictions by message size, or predictions beside measured tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topology import codec
from topology.errors import Infeasible, UserError

if TYPE_CHECKING:
    from topology.cluster import Cluster
    from topology.profile import Profile


def predicted_rows(
    cluster: Cluster,
    op: str,
    sizes: Sequence[int],
    *,
    gpus: int | None,
    cost_model: str,
    profile: Profile | None = None,
) -> list[dict[str, Any]]:
    """Return one row per size for `gpus` ranks in rank order (default: the whole cluster).

    Raises UserError for an unknown `op` or more ranks than GPUs, Infeasible where the cost model does not cover `op`.
    """
    from simulator.collectives import OPS, CollectiveModel  # noqa: PLC0415 - numpy
    from simulator.measured_collectives import MeasuredCollectives  # noqa: PLC0415 - as above
    from simulator.nccl_tables import evaluate  # noqa: PLC0415 - as above
    from topology.groups import GroupShape  # noqa: PLC0415 - as above

    ranks = gpus or cluster.gpu_count
    if op not in OPS:
        raise UserError(f"unknown collective {op!r}", remedy=f"--op {', '.join(OPS)}")
    if not 2 <= ranks <= cluster.gpu_count:
        raise UserError(f"{cluster.name} has {cluster.gpu_count} GPU(s); a collective of {ranks} cannot run there")
    nodes = -(-ranks // cluster.gpus_per_node)
    # A table of sizes without times is a question, so both cost models answer it by the way they answer tables.
    asked = {"machine": cluster.name, "gpus": ranks, "nodes": nodes, "collective": op}
    table = {**asked, "rows": [{"bytes": size} for size in sizes]}
    found = evaluate([table], model=cost_model, cluster_of=lambda *_: cluster)
    if found.skipped:
        raise Infeasible(
            f"no prediction for {op} on {ranks} GPUs of {cluster.name}",
            why=found.skipped[0].reason,
            remedy="try --cost-model meshwright" if cost_model == "nccl" else "",
        )
    rows = [dict(row) for row in codec.to_builtins(found.rows)]
    if profile is not None and profile.collectives and cost_model == "meshwright":
        model = CollectiveModel(cluster, measured=MeasuredCollectives(profile.collectives))
        shape = GroupShape(ranks=ranks, ranks_per_node=-(-ranks // nodes))
        for row, cost in zip(rows, model.choose_many(op, list(sizes), shape), strict=True):
            scale = row["time_s"]["value"] / cost.time_s.value
            row["time_s"] = codec.to_builtins(cost.time_s)
            row["busbw_bytes_per_s"] *= scale
            row["algorithm"] = f"{cost.algorithm}/{cost.protocol}"
    return rows


def table_rows(path: Path, *, cost_model: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for every row of measured tables, and the scores with what was skipped. Raises BadInput."""
    from simulator.nccl_tables import evaluate, read_tables  # noqa: PLC0415 - numpy

    found = codec.to_builtins(evaluate(read_tables(path), model=cost_model))
    return found.pop("rows"), found
