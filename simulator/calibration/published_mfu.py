"""The highest MFU that published runs reached, against which a predicted one can be judged.

`published_mfu.json` is written by tests/bench/published_mfu.py from published runs. No prediction is made from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from simulator.config.estimate import Estimate
from simulator.config.runtime import Runtime
from topology.cluster import Cluster
from topology.codec import convert

ALIKE = 4  # largest ratio of GPU counts for two runs to be compared
FEWEST = 3  # least number of comparable runs


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A run on `gpus` GPUs with a dense peak of `peak_flops` each, and the MFU that it reached; `source` names
    its row.
    """

    architecture: str
    peak_flops: float
    gpus: int
    mfu: float
    parameters: int
    runtime: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRuns:
    made_on: str
    command: str
    rows: tuple[PublishedRun, ...]


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return the runs shipped with the package."""
    text = (resources.files("simulator") / "calibration" / "published_mfu.json").read_text("utf-8")
    return convert(json.loads(text), PublishedRuns, where="published_mfu.json").rows


def highest_published(cluster: Cluster, peak_flops: float, gpus: int) -> PublishedRun | None:
    """Return the run with the highest MFU among those on a similar number of such GPUs and with this peak; None with
    fewer than `FEWEST`.
    """
    architecture = cluster.slowest_kind.architecture
    alike = [
        run
        for run in published_runs()
        if (run.architecture, run.peak_flops) == (architecture, peak_flops) and gpus / ALIKE <= run.gpus <= gpus * ALIKE
    ]
    return max(alike, key=lambda run: run.mfu) if len(alike) >= FEWEST else None


def exceeded(estimate: Estimate, cluster: Cluster, runtime: Runtime, gpus: int) -> PublishedRun | None:
    """Return the run with the highest MFU on such GPUs if the predicted MFU exceeds it, else None. None where adapters
    are trained: those runs train all weights.
    """
    best = None if runtime.adapter is not None else highest_published(cluster, estimate.peak_flops, gpus)
    return None if best is None or round(estimate.mfu, 2) <= round(best.mfu, 2) else best
