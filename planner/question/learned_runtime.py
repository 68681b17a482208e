"""A runtime learned from runs: a similar description, and the costs that its runs changed.

`planner learn` writes the file; `--runtime FILE` replaces the runtime of a case or a question. The learned costs are a
`RuntimeCosts`, as in a calibration with runs of layers, so all costs of plans use them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from simulator.calibration.calibration import Calibration, RuntimeCosts
from simulator.fitting.calibrations import Calibrations
from simulator.runtimes.library import runtime_spec
from simulator.runtimes.parts import HostSpec
from topology import codec
from topology.cluster import Cluster
from topology.codec import JsonObject
from topology.errors import BadInput

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A factor or seconds fitted to runs, with the 80 % range."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedRuntime:
    """`name` is the name of its runs, `like` the description around which they were fitted, `rows` their number.

    `fitted` has factors of described costs (`FACTORS`; `activation_factor` is a further factor of memory that is no
    state), fields of HostSpec, `crossing_s`, added to a collective for each crossing between nodes, and `flush_s`,
    added to a micro batch on a full GPU.
    """

    name: str
    like: str
    rows: int
    fitted: dict[str, Fitted]
    compile: bool = False
    left_out: dict[str, float | None] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def costs(self) -> RuntimeCosts:
        """Return the learned costs in the form of a calibration."""
        values = {name: one.value for name, one in self.fitted.items()}
        return costs_of(values, rows=self.rows)


HOST_FIELDS = frozenset(f.name for f in fields(HostSpec)) - {"synchronizes", "plain_tensors", "norm_to_host"}
LEAST_FACTOR, MOST = 1e-6, 1e6  # least factor; most of a factor, or of seconds: beyond any runtime
MEMORY_FACTORS = ("memory_factor", "activation_factor")
FACTORS = ("kernel_factor", "collective_factor", "network_factor", *MEMORY_FACTORS)
CROSSING, FLUSH = "crossing_s", "flush_s"
OTHER_COSTS = (CROSSING, FLUSH)


def costs_of(values: Mapping[str, float], *, rows: int) -> RuntimeCosts:
    """Return factors and host costs in the form of a calibration; all kinds of launch have one cost."""
    host = {name: value for name, value in values.items() if name not in (*FACTORS, *OTHER_COSTS)}
    if "launch_s" in host:
        host |= dict.fromkeys(("backward_launch_s", "dtensor_launch_s"), host["launch_s"])
    return RuntimeCosts(
        kernel_factor=values.get("kernel_factor", 1.0),
        collective_factor=values.get("collective_factor", 1.0),
        network_factor=values.get("network_factor", 1.0),
        crossing_s=values.get(CROSSING, 0.0),
        reserved=values.get("memory_factor", 1.0),
        activations=values.get("activation_factor", 1.0),
        flush_s=values.get(FLUSH),
        host=host,
        runs=rows,
    )


def read_learned(path: str | Path) -> LearnedRuntime:
    """Return the learned runtime of a file. Raises BadInput, naming the field, when it is none or its numbers cannot
    be.
    """
    data = codec.read_json(path)
    codec.require_schema(data, SCHEMA_VERSION, where=str(path), remedy="update meshwright, or learn it again")
    found = codec.convert(data, LearnedRuntime, where=str(path))
    runtime_spec(found.like)
    for name, one in found.fitted.items():
        if name not in HOST_FIELDS and name not in (*FACTORS, *OTHER_COSTS):
            raise BadInput(
                f"{path}: fitted.{name} is no cost of a runtime", why=f"known: {', '.join(sorted(HOST_FIELDS))}"
            )
        least = LEAST_FACTOR if name in FACTORS else 0.0
        if not least <= one.low <= one.value <= one.high <= MOST:
            raise BadInput(
                f"{path}: fitted.{name} is {one.value:g}, {one.low:g} to {one.high:g}",
                why=f"a value lies in its range, and that in {least:g} to {MOST:g}",
            )
    errors = [error for error in found.left_out.values() if error is not None]
    if not 1 <= found.rows <= MOST or not all(0 <= error < math.inf for error in errors):
        raise BadInput(f"{path}: rows or left_out cannot be", why="runs are at least one, errors are not negative")
    return found


def is_learned(word: str | None) -> bool:
    """Return whether a runtime is named by a file."""
    return bool(word) and codec.is_file(str(word))


class LearnedCalibrations(Calibrations):
    """Calibrations from a profile, if given, and from a learned runtime."""

    def __init__(self, below: Calibrations, learned: LearnedRuntime) -> None:
        super().__init__(below.profile, below.strict)
        self.learned = learned

    def on(self, cluster: Cluster) -> Calibration | None:
        """Return the calibration of `cluster`, in which learned costs of the runtime replace those from runs of
        layers.
        """
        found = super().on(cluster) or Calibration(gpu=cluster.slowest_kind)
        key = (runtime_spec(self.learned.like).names[0], self.learned.compile)
        return replace(found, runtimes={**found.runtimes, key: self.learned.costs()})


def in_place(data: Mapping[str, Any], learned: LearnedRuntime | None) -> JsonObject:
    """Return a case with the learned runtime in the place of its own; its other statements about the runtime stay."""
    if learned is None:
        return dict(data)
    stated = data.get("runtime")
    settings = {key: value for key, value in stated.items() if key != "version"} if isinstance(stated, dict) else {}
    return {**data, "runtime": {**settings, "name": learned.like, "compile": learned.compile}}
