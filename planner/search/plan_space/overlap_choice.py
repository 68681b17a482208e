"""Choose the combinations of overlap modes to search at the communications of a layer, for every way to shard it.

A layer has four sites where tensor parallelism communicates (`simulator.config.overlap_sites`). Each can use its own
mode, and no matrix product overlaps with two of them, so their costs add. A mode changes the device and host time of
the forward and backward pass, how long communication kernels hold SMs, and whether symmetric memory is needed
(`simulator.step.symmetric_memory`). A combination that is worse than another one in all of these is never part of the
best plan, whatever the pipeline, memory or data parallelism. Of 1,296 combinations a few remain, mostly the fastest and
the fastest without symmetric memory; the search treats them as another policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.search.plan_space.candidates import Nodes
from simulator.analytical.layer_cost import BlockCost
from simulator.bounds.screening import Screening
from simulator.columns.plan_columns import distinct
from simulator.columns.plan_table import Floats
from simulator.config.overlap_sites import NONE, SITES, modes_in, written
from simulator.legality.frameworks import Framework
from simulator.overlap.site_costs import PUSHED_MODES

MAX_CHOICES = 10  # combinations kept for each way to shard a layer, the fastest first


def with_overlap_by_site(screening: Screening, nodes: Nodes, framework: Framework, recomputes: Sequence[str]) -> Nodes:
    """Return `nodes` with a combination of overlap modes by site instead of one mode at all sites."""
    offered = nodes.choices["tp_overlap"]
    modes = [mode for mode, legal in offered if mode != NONE and legal.any()]
    if not framework.overlap_by_site or not modes:
        return nodes
    legal = np.logical_or.reduce([mask for mode, mask in offered if mode != NONE])
    rows = np.nonzero(legal)[0]
    columns = nodes.columns.take(rows)
    first, which = distinct(
        columns.tp, columns.cp, columns.ep, columns.etp, columns.micro_batch_size, columns.sequence_parallel
    )
    tried = [NONE, *modes, *(written({site: mode}) for site in SITES for mode in modes)]
    several = columns.take(np.repeat(first, len(tried)))
    several = replace(several, tp_overlap=np.tile(np.array(tried), len(first)))
    table = screening.table(several)
    shared = screening.blocks(table, recomputes)
    costs = shared.take(np.arange(len(several)))
    figures = _pass_times(screening, costs, (len(first), len(tried)))
    masks: dict[str, NDArray[np.bool_]] = {NONE: ~legal}
    for number in range(len(first)):
        for text in _undominated_choices(figures.of_sharding(number), modes):
            mask = masks.setdefault(text, np.zeros(len(nodes), dtype=np.bool_))
            mask[rows[which == number]] = True
    return replace(nodes, choices={**nodes.choices, "tp_overlap": tuple(masks.items())})


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassTimes:
    """Effects of combinations of modes: seconds, with axes (way to shard, combination, pass of a block).

    `device` and `host` are their times, `held_s` the slowdown by SMs that communication kernels hold; `runs` is how
    often each pass runs in the whole network.
    """

    device: Floats
    held_s: Floats
    host: Floats
    runs: Floats

    def of_sharding(self, number: int) -> _PassTimes:
        """Return the times of one way to shard, without that axis."""
        return _PassTimes(
            device=self.device[number], held_s=self.held_s[number], host=self.host[number], runs=self.runs
        )

    def __getitem__(self, choice: Any) -> _PassTimes:
        return _PassTimes(
            device=self.device[choice], held_s=self.held_s[choice], host=self.host[choice], runs=self.runs
        )

    def with_changes(self, by: Sequence[tuple[_PassTimes, _PassTimes]]) -> _PassTimes:
        """Return these times plus the difference of each (mode, no overlap)."""
        return _PassTimes(
            device=self.device + sum(a.device - b.device for a, b in by),
            held_s=self.held_s + sum(a.held_s - b.held_s for a, b in by),
            host=self.host + sum(a.host - b.host for a, b in by),
            runs=self.runs,
        )

    def comparable(self) -> Floats:
        """Return one vector per combination; the time of a host that is never slower than the device does not count."""
        ahead = self.host.max(axis=0) <= self.device.min(axis=0)
        return np.concatenate([self.device + self.held_s, self.device, np.where(ahead, 0.0, self.host)], axis=1)

    def seconds(self) -> Floats:
        """Return roughly the time of the whole network, each pass taking as long as the slower of device and host."""
        return np.asarray(((np.maximum(self.device, self.host) + self.held_s) * self.runs).sum(axis=-1))


def _pass_times(screening: Screening, costs: dict[str, BlockCost], shape: tuple[int, int]) -> _PassTimes:
    model, host = screening.scenario.model, screening.operators.spec.host
    # Maximum host overhead of the runtime per layer; half of it in each pass.
    layer_s = (host.forward_layer_s + host.backward_layer_s + host.tp_layer_s + host.fsdp_layer_s + host.cp_layer_s) / 2
    layers = {"dense": model.dense_layers, "moe": model.moe_layers}
    passes, runs, host_overhead_s = [], [], []
    for name, block in costs.items():
        passes += [block.forward, block.backward, *block.recompute.values()]
        count = float(layers.get(name, 1))
        runs += [count, count, *[0.0] * len(block.recompute)]
        host_overhead_s += [layer_s if name in layers else 0.0] * (2 + len(block.recompute))
    return _PassTimes(
        device=np.stack([each.device_s.reshape(shape) for each in passes], axis=2),
        held_s=np.stack([each.lost_s.reshape(shape) for each in passes], axis=2),
        host=np.stack([each.host_s.reshape(shape) for each in passes], axis=2) + np.array(host_overhead_s),
        runs=np.array(runs),
    )


def _undominated_choices(tried: _PassTimes, modes: Sequence[str]) -> list[str]:
    """Return the undominated combinations, from the times without overlap, of each mode at all sites, and of each mode
    at each site.
    """
    none, count = tried[0], len(modes)
    symmetric_modes = np.array([mode in PUSHED_MODES for mode in (NONE, *modes)])
    by_site = []
    for number in range(len(SITES)):
        rows_of_site = [0, *range(1 + (number + 1) * count, 1 + (number + 2) * count)]
        kept = _undominated(np.column_stack([tried[rows_of_site].comparable(), symmetric_modes]))
        by_site.append([((NONE, *modes)[index], tried[rows_of_site[index]]) for index in kept])
    texts, found = list(modes), [tried[number] for number in range(1, 1 + count)]
    for chosen in product(*by_site):
        names = [name for name, _ in chosen]
        if len(set(names)) > 1 or names[0] == NONE:  # the same mode at all sites is written as its name
            texts.append(written(dict(zip(SITES, names, strict=True))))
            found.append(none.with_changes([(figures, none) for _, figures in chosen]))
    combined = _PassTimes(
        device=np.stack([f.device for f in found]),
        held_s=np.stack([f.held_s for f in found]),
        host=np.stack([f.host for f in found]),
        runs=none.runs,
    )
    seconds = combined.seconds()
    needs_symmetric_memory = np.array([bool(set(modes_in(text)) & set(PUSHED_MODES)) for text in texts])
    kept = sorted(
        _undominated(np.column_stack([combined.comparable(), needs_symmetric_memory])),
        key=lambda row: (float(seconds[row]), row),
    )
    least_host, fastest_without_memory = (
        int(np.argmin(combined.host.sum(axis=1))),
        next(row for row in kept if not needs_symmetric_memory[row]),
    )
    return [texts[row] for row in dict.fromkeys([*kept[:MAX_CHOICES], least_host, fastest_without_memory])]


def _undominated(vectors: Floats) -> list[int]:
    """Return the rows that no other row equals or beats in every entry; of equal rows the first."""
    undominated: list[int] = []
    best = np.empty_like(vectors)  # the undominated rows so far, concatenated, to compare all of them at once
    for row in np.lexsort((np.arange(len(vectors)), vectors.sum(axis=1))):
        if not (best[: len(undominated)] <= vectors[row]).all(axis=1).any():
            best[len(undominated)] = vectors[row]
            undominated.append(int(row))
    return undominated
