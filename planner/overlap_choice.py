"""Which overlap modes are worth trying at each communication of a layer, for every way to shard it.

A layer has four places where tensor parallelism moves tokens (`simulator.overlap_sites`). Each can run in its own mode, and
no product is beside two of them, so their costs add. What a mode changes is what the device and the host take forward and
backward, how long SMs are held, and whether GPUs hold symmetric memory (`simulator.overlap_memory`); a choice of modes that
another beats in all of these is never part of the best plan, whatever the pipeline, memory or data parallelism around it.
Of 1,296 choices a few are left, mostly the quickest and the quickest without such memory: the search takes them as one more
choice of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.candidates import Nodes
from planner.frameworks import Framework
from simulator.data_parallel import FSDP_OPS, sm_share
from simulator.layer_cost import BlockCost
from simulator.overlap_sites import NONE, SITES, modes_in, written
from simulator.plan_columns import distinct
from simulator.plan_table import Floats
from simulator.screening import Screening
from simulator.site_costs import PUSHED_MODES

MOST = 10  # choices kept for one way to shard a layer: the quickest; the one that asks least of the host; and of memory


def with_sites(screening: Screening, nodes: Nodes, framework: Framework, recomputes: Sequence[str]) -> Nodes:
    """Return `nodes` with the choices of modes by site that are worth trying in place of one mode everywhere."""
    offered = nodes.choices["tp_overlap"]
    modes = [mode for mode, legal in offered if mode != NONE and legal.any()]
    if not framework.overlap_by_site or not modes:
        return nodes
    legal = np.logical_or.reduce([mask for mode, mask in offered if mode != NONE])
    rows = np.nonzero(legal)[0]
    columns = nodes.columns.take(rows)
    first, which = distinct(columns.tp, columns.cp, columns.ep, columns.micro_batch_size, columns.sequence_parallel)
    tried = [NONE, *modes, *(written({site: mode}) for site in SITES for mode in modes)]
    several = columns.take(np.repeat(first, len(tried)))
    several = replace(several, tp_overlap=np.tile(np.array(tried), len(first)))
    table = screening.table(several)
    shared = screening.blocks(table, recomputes)
    costs = shared.take(np.arange(len(several)))
    some = np.zeros(1, dtype=np.intp)
    share = sm_share(screening.plans(several.take(some), shared, some).context, *FSDP_OPS)
    figures = _figures(screening, costs, share, (len(first), len(tried)))
    masks: dict[str, NDArray[np.bool_]] = {NONE: ~legal}
    for number in range(len(first)):
        for text in _worth_trying(figures.of(number), modes):
            mask = masks.setdefault(text, np.zeros(len(nodes), dtype=np.bool_))
            mask[rows[which == number]] = True
    return replace(nodes, choices={**nodes.choices, "tp_overlap": tuple(masks.items())})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What choices of modes change, less being better: seconds with the axes (way to shard, choice, pass of a block).

    On the `device`, `held` by SMs that it lacks, and on the `host`. `often` a pass runs in the whole network.
    """

    device: Floats
    held: Floats
    host: Floats
    often: Floats

    def of(self, number: int) -> _Figures:
        """Return those of one way to shard, without that axis."""
        return _Figures(device=self.device[number], held=self.held[number], host=self.host[number], often=self.often)

    def __getitem__(self, choice: Any) -> _Figures:
        return _Figures(device=self.device[choice], held=self.held[choice], host=self.host[choice], often=self.often)

    def changed(self, by: Sequence[tuple[_Figures, _Figures]]) -> _Figures:
        """Return these with what each (choice, none) differs in."""
        return _Figures(
            device=self.device + sum(a.device - b.device for a, b in by),
            held=self.held + sum(a.held - b.held for a, b in by),
            host=self.host + sum(a.host - b.host for a, b in by),
            often=self.often,
        )

    def compared(self) -> Floats:
        """Return rows that can be compared. A host that is never slower than the device counts for nothing."""
        ahead = self.host.max(axis=0) <= self.device.min(axis=0)
        return np.concatenate([self.device + self.held, self.device, np.where(ahead, 0.0, self.host)], axis=1)

    def seconds(self) -> Floats:
        """Return about what the whole network takes, each pass as long as the slower of device and host."""
        return np.asarray(((np.maximum(self.device, self.host) + self.held) * self.often).sum(axis=-1))


def _figures(screening: Screening, costs: dict[str, BlockCost], share: float, shape: tuple[int, int]) -> _Figures:
    model, host = screening.model, screening.operators.spec.host
    # What the runtime adds to a layer, at the most: half of it in either pass.
    layer_s = (host.forward_layer_s + host.backward_layer_s + host.tp_layer_s + host.fsdp_layer_s + host.cp_layer_s) / 2
    layers = {"dense": model.layers - model.moe_layers, "moe": model.moe_layers}
    passes, often, added = [], [], []
    for name, block in costs.items():
        passes += [block.forward, block.backward, *block.recompute.values()]
        count = float(layers.get(name, 1))
        often += [count, count, *[0.0] * len(block.recompute)]
        added += [layer_s if name in layers else 0.0] * (2 + len(block.recompute))
    return _Figures(
        device=np.stack([each.device_s.reshape(shape) for each in passes], axis=2),
        held=share * np.stack([each.hidden_s.reshape(shape) for each in passes], axis=2),
        host=np.stack([each.host_s.reshape(shape) for each in passes], axis=2) + np.array(added),
        often=np.array(often),
    )


def _worth_trying(tried: _Figures, modes: Sequence[str]) -> list[str]:
    """Return the choices that no other beats, from the figures of none, of each mode everywhere, and of each at a site."""
    none, count = tried[0], len(modes)
    holding = np.array([mode in PUSHED_MODES for mode in (NONE, *modes)])
    by_site = []
    for number in range(len(SITES)):
        here = [0, *range(1 + (number + 1) * count, 1 + (number + 2) * count)]
        kept = _undominated(np.column_stack([tried[here].compared(), holding]))
        by_site.append([((NONE, *modes)[index], tried[here[index]]) for index in kept])
    texts, found = list(modes), [tried[number] for number in range(1, 1 + count)]
    for chosen in product(*by_site):
        names = [name for name, _ in chosen]
        if len(set(names)) > 1 or names[0] == NONE:  # one mode at all sites is its word, which reaches further
            texts.append(written(dict(zip(SITES, names, strict=True))))
            found.append(none.changed([(figures, none) for _, figures in chosen]))
    every = _Figures(
        device=np.stack([f.device for f in found]),
        held=np.stack([f.held for f in found]),
        host=np.stack([f.host for f in found]),
        often=none.often,
    )
    seconds = every.seconds()
    held = np.array([bool(set(modes_in(text)) & set(PUSHED_MODES)) for text in texts])
    kept = sorted(_undominated(np.column_stack([every.compared(), held])), key=lambda row: (float(seconds[row]), row))
    leanest, smallest = int(np.argmin(every.host.sum(axis=1))), next(row for row in kept if not held[row])
    return [texts[row] for row in dict.fromkeys([*kept[:MOST], leanest, smallest])]


def _undominated(vectors: Floats) -> list[int]:
    """Return the rows that no other is as good as in everything; of equals the first."""
    kept: list[int] = []
    for row in np.lexsort((np.arange(len(vectors)), vectors.sum(axis=1))):
        if not any((vectors[other] <= vectors[row]).all() for other in kept):
            kept.append(int(row))
    return kept
