"""Published nccl-tests tables against a cost model: what `planner collective --tables FILE` answers.

A file is `{"tables": [{machine, gpus, nodes, interconnect, collective, dtype, tool, rows: [{bytes, time_us,
busbw}]}]}`. Machines are named in free text; `cluster_for_machine` turns that into a catalogue cluster, and a table it
cannot place is skipped with the reason, never guessed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from simulator.collectives import nccl_model
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.launch_mode import LaunchMode, launched
from simulator.collectives.measured import MeasuredCollectives
from simulator.collectives.times import steps_and_share
from topology.catalog.gpus import gpu_described
from topology.cluster import Cluster
from topology.codec import JsonObject, read_json
from topology.errors import BadInput, PlannerError
from topology.profile.profile import CollectiveSample
from topology.rates.groups import GroupShape
from topology.units import MIB

COST_MODELS = ("meshwright", "nccl")
BANDS = (  # upper bound in bytes, name
    (64 * 2**10, "<=64KiB"),
    (MIB, "64KiB-1MiB"),
    (32 * MIB, "1-32MiB"),
    (512 * MIB, "32-512MiB"),
    (float("inf"), ">512MiB"),
)
_OPS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}
ClusterOf = Callable[[str, int, int, str], Cluster | None]
SamplesOf = Callable[[Cluster], tuple[CollectiveSample, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One predicted point. `error` is predicted / measured - 1; `known` marks a size that was given to the model as a
    sample.
    """

    machine: str
    op: str
    gpus: int
    nodes: int
    bytes: int
    time_s: Seconds
    algorithm: str
    busbw_bytes_per_s: float
    measured_s: float | None
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedTable:
    id: int | str | None
    machine: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Mean and median absolute relative error, median predicted / measured, and how many points lie in their
    interval.
    """

    points: int
    mean_error: float
    median_error: float
    median_ratio: float
    within_interval: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEvaluation:
    rows: tuple[TableRow, ...]
    skipped: tuple[SkippedTable, ...]
    overall: Score | None
    by_machine: dict[str, Score] = field(default_factory=dict)
    by_band: dict[str, Score] = field(default_factory=dict)
    by_machine_and_band: dict[str, dict[str, Score]] = field(default_factory=dict)
    cost_model: str = "meshwright"
    known_every: int | None = None


def read_tables(path: str | Path) -> list[JsonObject]:
    """Return the tables of a file as plain data. Raises BadInput when it is not shaped like one."""
    document = read_json(path)
    tables = document.get("tables") if isinstance(document, dict) else document
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise BadInput(f"{path} holds no tables", why='expected {"tables": [{...}, ...]}')
    return tables


def cluster_for_machine(text: str, gpus: int, nodes: int, interconnect: str) -> Cluster | None:
    """Return the catalogue's cluster for a machine described in words, or None if it names no GPU of the catalogue.

    The driver's name in parentheses counts first, then words. Ranks that share one multi-node NVLink domain get one
    node. `NIC` speed is read from words such as `8x400G`.
    """
    catalog: Any = import_module("topology.catalog.clusters")  # loads data files, so it is imported only when needed
    names: Any = import_module("topology.catalog.gpus")

    words = f"{text} {interconnect}".lower()
    named = [names.match_driver_name(name) for name in re.findall(r"\(([^()]*)\)", text)]
    gpu = next((kind.name for kind in named if kind is not None), None) or gpu_described(text.lower())
    if gpu is None:
        return None
    spec: JsonObject = {"gpu": gpu}
    if one_domain(words):
        spec["nodes"] = 1
    elif nodes > 1:
        spec |= {"nodes": nodes, "gpus_per_node": -(-gpus // nodes)}
        if port := re.search(r"(\d{3})\s?g(?!pu)", words):
            spec["nic_gbit_per_gpu"] = int(port[1])
    if "mesh" in words:
        spec |= {"gpus_per_node": gpus, "interconnect": "nvlink"}
    found: Cluster = catalog.cluster_from_case(spec)[0]
    if nodes == 1 and found.gpus_per_node < gpus:
        found = catalog.cluster_from_case(spec | {"gpus_per_node": gpus})[0]
    return found


def one_domain(words: str) -> bool:
    """Say whether several hosts share one NVLink fabric."""
    return any(word in words.lower() for word in ("mnnvl", "nvl72", "nvl36"))


def evaluate(
    tables: Iterable[Mapping[str, Any]],
    *,
    model: str = "meshwright",
    known_every: int | None = None,
    cluster_of: ClusterOf = cluster_for_machine,
    samples_of: SamplesOf | None = None,
    launch: LaunchMode | None = None,
    algorithm: str | None = None,
) -> TableEvaluation:
    """Predict every row of every table and score it where it was measured.

    `model` is one of COST_MODELS. With `known_every` k, rows 0, k, 2k, ... of each table are given to the model as
    samples of the machine and only the others are predicted. `samples_of` gives what a profile measured on a cluster.
    `launch` and `algorithm` override those of a table. NCCL's formulas have intervals of width zero.
    """
    if model not in COST_MODELS:
        raise BadInput(f"unknown cost model {model!r}", remedy=f"use one of {', '.join(COST_MODELS)}")
    if known_every is not None and known_every < 2:
        raise BadInput(f"every {known_every}th size known leaves none to predict", remedy="use 2 or more")
    rows: list[TableRow] = []
    skipped: list[SkippedTable] = []
    models: dict[tuple[str, int, int, str], CollectiveModel | None] = {}
    for index, table in enumerate(tables):
        try:
            inputs = _Table.read(table)
            inputs = replace(inputs, launch=launch or inputs.launch, algorithm=algorithm or inputs.algorithm)
            rows += _predict(inputs, model, known_every, cluster_of, samples_of, models)
        except (_SkipTableError, PlannerError) as problem:
            name = str(table.get("machine", ""))
            skipped.append(SkippedTable(id=table.get("id", index), machine=name, reason=str(problem)))
    return _summed(tuple(rows), tuple(skipped), model, known_every)


class _SkipTableError(Exception):
    """A table that cannot be predicted; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    machine: str
    gpus: int
    nodes: int
    interconnect: str
    op: str
    int8: bool
    launch: LaunchMode
    algorithm: str | None
    sizes: tuple[int, ...]
    times_s: tuple[float | None, ...]
    algorithms: tuple[str | None, ...]

    @staticmethod
    def read(table: Mapping[str, Any]) -> _Table:
        gpus: Any = table.get("gpus")
        nodes: Any = table.get("nodes") or 1
        op = _OPS.get(str(table.get("collective", "")).lower())
        if op is None:
            raise _SkipTableError(f"collective {table.get('collective')!r} is not modelled")
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (gpus, nodes))
        if not whole or gpus < 2 or not 1 <= nodes <= gpus:
            raise _SkipTableError(f"{gpus!r} GPUs on {nodes!r} nodes")
        tool = str(table.get("tool") or "").lower()
        listed = table.get("rows")
        rows = [
            row
            for row in (listed if isinstance(listed, list) else ())
            if isinstance(row, dict) and (_positive(row.get("bytes")) or 0.0) >= 1
        ]
        if not rows:
            raise _SkipTableError("no row says how many bytes it moved")
        # Bus bandwidth over bytes per second, for rows that give no time; those of one node print it instead.
        factor = steps_and_share(op, gpus)[1] if op not in {"send_recv", "broadcast"} else 1.0
        return _Table(
            machine=str(table.get("machine", "")),
            gpus=gpus,
            nodes=nodes,
            interconnect=str(table.get("interconnect") or ""),
            op=op,
            int8=str(table.get("dtype") or "") in {"int8", "uint8"} and op in {"all_reduce", "reduce_scatter"},
            launch=LaunchMode.ISOLATED if "all_reduce_bench" in tool else LaunchMode.QUEUED,
            algorithm="one_shot" if "msccl" in tool else "ring" if "ring forced" in tool else None,
            sizes=tuple(int(row["bytes"]) for row in rows),
            times_s=tuple(_time_s(row, factor) for row in rows),
            algorithms=tuple("ring" if "ring" in str(row.get("algo") or "").lower() else None for row in rows),
        )


def _time_s(row: Mapping[str, Any], factor: float) -> float | None:
    """Return a row's seconds, from its time or else its bus bandwidth."""
    if time := _positive(row.get("time_us")):
        return time * 1e-6
    if busbw := _positive(row.get("busbw")):
        return float(row["bytes"]) * factor / (busbw * 1e9)
    return None


def _positive(value: Any) -> float | None:
    """Return a finite number above zero and below 1e18, as any size or time is, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        return None
    return float(value)


def _predict(
    table: _Table,
    cost_model: str,
    known_every: int | None,
    cluster_of: ClusterOf,
    samples_of: SamplesOf | None,
    models: dict[tuple[str, int, int, str], CollectiveModel | None],
) -> Iterator[TableRow]:
    key = (table.machine, table.gpus, table.nodes, table.interconnect)
    if key not in models:
        found = cluster_of(*key)
        samples = samples_of(found) if found is not None and samples_of is not None else ()
        profiled = MeasuredCollectives(samples) if samples else None
        models[key] = None if found is None else CollectiveModel(found, measured=profiled)
    known = models[key]
    if known is None:
        raise _SkipTableError("no GPU of the catalogue is named in the machine's description")
    # Hosts of a rack that share NVLink count as one node.
    nodes = -(-table.gpus // known.cluster.gpus_per_node)
    shape = GroupShape(ranks=table.gpus, ranks_per_node=-(-table.gpus // nodes))
    given = [known_every is not None and i % known_every == 0 for i in range(len(table.sizes))]
    if cost_model == "nccl":
        seconds, names = _by_nccl(known, table, shape)
    else:
        seconds, names = _by_cost_model(known, table, shape, given)
    factor = steps_and_share(table.op, table.gpus)[1] if table.op not in {"send_recv", "broadcast"} else 1.0
    for size, time, name, measured, skip in zip(table.sizes, seconds, names, table.times_s, given, strict=True):
        if skip:
            continue
        yield TableRow(
            machine=table.machine,
            op=table.op,
            gpus=table.gpus,
            nodes=table.nodes,
            bytes=size,
            time_s=time,
            algorithm=name,
            busbw_bytes_per_s=size * factor / time.value,
            measured_s=measured,
            error=time.value / measured - 1 if measured else None,
        )


def _by_cost_model(
    model: CollectiveModel, table: _Table, shape: GroupShape, given: list[bool]
) -> tuple[list[Seconds], list[str]]:
    if any(given):
        samples = [
            CollectiveSample(
                op=table.op, ranks=table.gpus, nodes=shape.nodes, nbytes=size, time_s=time, launch=table.launch
            )
            for size, time, use in zip(table.sizes, table.times_s, given, strict=True)
            if use and time
        ]
        profiled = model.measured.samples if model.measured is not None else ()
        model = CollectiveModel(model.cluster, measured=MeasuredCollectives((*profiled, *samples)))
    forced = [row or table.algorithm for row in table.algorithms]
    seconds, names = [], []
    groups: dict[str | None, list[int]] = defaultdict(list)
    for index, algorithm in enumerate(forced):
        groups[algorithm].append(index)
    found: dict[int, tuple[Seconds, str]] = {}
    for algorithm, indices in groups.items():
        costs = model.choose_many(
            table.op,
            np.array([table.sizes[i] for i in indices], dtype=np.float64),
            shape,
            launch=table.launch,
            int8=table.int8,
            algorithm=algorithm,
        )
        for index, cost in zip(indices, costs, strict=True):
            interval = cost.time_s
            found[index] = (
                Seconds(value=interval.value, low=interval.low, high=interval.high),
                f"{cost.algorithm}/{cost.protocol}",
            )
    for index in range(len(table.sizes)):
        seconds.append(found[index][0])
        names.append(found[index][1])
    return seconds, names


def _by_nccl(model: CollectiveModel, table: _Table, shape: GroupShape) -> tuple[list[Seconds], list[str]]:
    comm = model.communicator(shape)
    if not comm.compute_capability:
        raise _SkipTableError("NCCL does not run on this GPU")
    machine = replace(comm.nccl, ll128_blackwell=nccl_model.LL128_BLACKWELL)
    times, pick, lines = nccl_model.choose(machine, table.op, list(table.sizes), allow_nvls=not table.int8)
    if not lines:
        raise _SkipTableError(f"NCCL's formulas do not cover {table.op}")
    total = launched(times, table.launch)
    return (
        [Seconds(value=float(t), low=float(t), high=float(t)) for t in total],
        [f"{lines[i].algorithm}/{lines[i].protocol}" for i in pick],
    )


def band_of(size: int) -> str:
    return next(name for bound, name in BANDS if size <= bound)


def score(rows: Iterable[TableRow]) -> Score | None:
    """Return the errors of the measured rows, or None when there are none."""
    scored = [row for row in rows if row.error is not None and row.measured_s is not None]
    if not scored:
        return None
    errors = np.array([row.error for row in scored], dtype=np.float64)
    inside = [row.time_s.low <= (row.measured_s or 0.0) <= row.time_s.high for row in scored]
    return Score(
        points=len(scored),
        mean_error=float(np.mean(np.abs(errors))),
        median_error=float(np.median(np.abs(errors))),
        median_ratio=float(np.median(errors + 1)),
        within_interval=float(np.mean(inside)),
    )


def _summed(
    rows: tuple[TableRow, ...], skipped: tuple[SkippedTable, ...], model: str, known_every: int | None
) -> TableEvaluation:
    machines: dict[str, list[TableRow]] = defaultdict(list)
    bands: dict[str, list[TableRow]] = defaultdict(list)
    cells: dict[str, dict[str, list[TableRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        band = band_of(row.bytes)
        machines[row.machine].append(row)
        bands[band].append(row)
        cells[row.machine][band].append(row)
    order = [name for _, name in BANDS]
    return TableEvaluation(
        rows=rows,
        skipped=skipped,
        overall=score(rows),
        by_machine=_scores(machines),
        by_band=_scores({name: bands[name] for name in order if name in bands}),
        by_machine_and_band={
            machine: _scores({name: found[name] for name in order if name in found}) for machine, found in cells.items()
        },
        cost_model=model,
        known_every=known_every,
    )


def _scores(groups: Mapping[str, list[TableRow]]) -> dict[str, Score]:
    return {name: result for name, rows in groups.items() if (result := score(rows)) is not None}
