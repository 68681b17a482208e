"""The rows of `planner collective`: predictions by message size, or predictions beside measured tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topology import codec
from topology.errors import Infeasible, UserError

if TYPE_CHECKING:
    from topology.cluster import Cluster
    from topology.profile import CollectiveSample, Profile


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
) -> list[dict[str, Any]]:
    """Return one row per size for `gpus` ranks in rank order (default: the whole cluster).

    Raises UserError for an unknown `op` or `algorithm` or more ranks than GPUs, Infeasible where the cost model does
    not cover what is asked.
    """
    from simulator.collectives import ALGORITHMS, OPS  # noqa: PLC0415 - numpy
    from simulator.launch_mode import LaunchMode  # noqa: PLC0415 - as above
    from simulator.nccl_tables import evaluate  # noqa: PLC0415 - as above

    ranks = gpus or cluster.gpu_count
    if op not in OPS:
        raise UserError(f"unknown collective {op!r}", remedy=f"--op {', '.join(OPS)}")
    if algorithm is not None and (algorithm not in ALGORITHMS or cost_model == "nccl"):
        raise UserError(
            f"--algorithm {algorithm} cannot be asked for",
            why="NCCL's formulas choose for themselves" if cost_model == "nccl" else "",
            remedy=f"one of {', '.join(ALGORITHMS)}, with --cost-model meshwright",
        )
    if not 2 <= ranks <= cluster.gpu_count:
        raise UserError(f"{cluster.name} has {cluster.gpu_count} GPU(s); a collective of {ranks} cannot run there")
    nodes = -(-ranks // cluster.gpus_per_node)
    # A table of sizes without times is a question, so both cost models answer it by the way they answer tables.
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
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return a row for every row of measured tables, and the scores with what was skipped. Raises BadInput.

    A profile goes before the model on tables of the GPU it was taken on. With `known_every` k, each table gives away
    every kth of its own rows and is scored on the others.
    """
    from simulator.nccl_tables import evaluate, read_tables  # noqa: PLC0415 - numpy

    found = codec.to_builtins(
        evaluate(read_tables(path), model=cost_model, known_every=known_every, samples_of=_samples_of(profile))
    )
    return found.pop("rows"), found


def _samples_of(profile: Profile | None) -> Callable[[Cluster], tuple[CollectiveSample, ...]]:
    """Return a function that gives a profile's samples to clusters of the GPU it was taken on."""
    from topology.gpus import gpu_kind  # noqa: PLC0415 - reads the catalogue

    name = gpu_kind(profile.gpu).name if profile is not None else None

    def samples(cluster: Cluster) -> tuple[CollectiveSample, ...]:
        return profile.collectives if profile is not None and cluster.slowest_kind.name == name else ()

    return samples
