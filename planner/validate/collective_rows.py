"""The rows of `planner collective`: predictions by message size, or compared with measured tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from simulator.collectives.cost import ALGORITHMS, OPS
from simulator.collectives.launch_mode import LaunchMode
from simulator.collectives.nccl_tables import evaluate, read_tables
from simulator.fitting.calibrations import same_gpu
from topology import codec
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import Infeasible, UserError
from topology.profile.profile import CollectiveSample, Profile
from topology.rates.reach import reach


def predicted_rows(
    cluster: Cluster,
    op: str,
    sizes: Sequence[int],
    *,
    gpus: int | None,
    cost_model: str,
    profile: Profile | None = None,
    launch: str | None = None,
    algorithm: str | None = None,
) -> list[JsonObject]:
    """Return one row per size for `gpus` ranks in rank order (default: the whole cluster).

    Raises UserError for an unknown `op` or `algorithm` or more ranks than GPUs, Infeasible if the cost model does not
    cover the operation.
    """
    ranks = gpus or cluster.gpu_count
    if op not in OPS:
        raise UserError(f"unknown collective {op!r}", remedy=f"--op {', '.join(OPS)}")
    if algorithm is not None and (algorithm not in ALGORITHMS or cost_model == "nccl"):
        raise UserError(
            f"--algorithm {algorithm} cannot be used",
            why="NCCL's formulas choose the algorithm themselves" if cost_model == "nccl" else "",
            remedy=f"one of {', '.join(ALGORITHMS)}, with --cost-model meshwright",
        )
    if not 2 <= ranks <= cluster.gpu_count:
        raise UserError(f"{cluster.name} has {cluster.gpu_count} GPU(s); a collective of {ranks} cannot run there")
    reached = reach(cluster)
    if ranks > reached.gpus:
        raise Infeasible(f"a collective of {ranks} GPUs cannot run on {cluster.name}", why=reached.why)
    nodes = -(-ranks // cluster.gpus_per_node)
    # Evaluated like a measured table, but without times.
    asked = {"machine": cluster.name, "gpus": ranks, "nodes": nodes, "collective": op}
    table = {**asked, "rows": [{"bytes": size} for size in sizes]}
    found = evaluate(
        [table],
        model=cost_model,
        cluster_of=lambda *_: cluster,
        samples_of=_samples_of(profile),
        launch=LaunchMode(launch) if launch else None,
        algorithm=algorithm,
    )
    if found.skipped:
        raise Infeasible(
            f"no prediction for {op} on {ranks} GPUs of {cluster.name}",
            why=found.skipped[0].reason,
            remedy="try --cost-model meshwright" if cost_model == "nccl" else "",
        )
    return [dict(row) for row in codec.to_builtins(found.rows)]


def table_rows(
    path: Path, *, cost_model: str, profile: Profile | None = None, known_every: int | None = None
) -> tuple[list[JsonObject], JsonObject]:
    """Return a row for every row of measured tables, and the scores with what was skipped. Raises BadInput.

    For tables of the GPU on which a profile was taken, its samples are used first. With `known_every` k, the model may
    use every k-th row of each table and is scored on the others.
    """
    found = codec.to_builtins(
        evaluate(read_tables(path), model=cost_model, known_every=known_every, samples_of=_samples_of(profile))
    )
    return found.pop("rows"), found


def _samples_of(profile: Profile | None) -> Callable[[Cluster], tuple[CollectiveSample, ...]]:
    """Return a function from a cluster to the samples of `profile`, if that was taken on the same GPU."""

    def samples(cluster: Cluster) -> tuple[CollectiveSample, ...]:
        return profile.collectives if profile is not None and same_gpu(profile, cluster.slowest_kind) else ()

    return samples
