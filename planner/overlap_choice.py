"""Which overlap modes are worth trying at each communication of a layer, for every way to shard it.

A layer has four places where tensor parallelism moves tokens (`simulator.overlap_sites`). Each can run in its own mode, and
no product is beside two of them, so their costs add. What a mode changes is what the device and the host take forward and
backward, and how long SMs are held; a choice of modes that another beats in all of these is never part of the best plan,
whatever the pipeline, memory or data parallelism around it. Of 1,296 choices a few are left, mostly one: the search takes
them as one more choice of the plan. No mode of these costs memory in this model, so that none is kept for its sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from planner.candidates import Nodes
from planner.frameworks import Framework
from simulator.data_parallel import FSDP_OPS, sm_share
from simulator.layer_cost import BlockCost
from simulator.overlap_sites import NONE, SITES, written
from simulator.plan_columns import distinct
from simulator.plan_table import Floats
from simulator.runtime_library import HostSpec
from simulator.screening import Screening

MOST = 12  # choices kept for one way to shard a layer; beyond, those with the least sum


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
    vectors = _figures(costs, screening.operators.spec.host, share, (len(first), len(tried)))
    masks: dict[str, NDArray[np.bool_]] = {NONE: ~legal}
    for number in range(len(first)):
        for text in _worth_trying(vectors[number], modes):
            mask = masks.setdefault(text, np.zeros(len(nodes), dtype=np.bool_))
            mask[rows[which == number]] = True
    return replace(nodes, choices={**nodes.choices, "tp_overlap": tuple(masks.items())})


def _figures(costs: dict[str, BlockCost], host: HostSpec, share: float, shape: tuple[int, int]) -> Floats:
    """Return what choices of modes change, less being better, with the axes (way to shard, choice, figure).

    By block and pass: seconds on the device, with and without what held SMs cost it, and on the host. The host's count
    for nothing where the device takes longer than the host could with any choice.
    """
    layer_s = host.forward_layer_s + host.backward_layer_s + host.tp_layer_s + host.fsdp_layer_s + host.cp_layer_s
    found = []
    for block in costs.values():
        for each in (block.forward, block.backward, *block.recompute.values()):
            on_device, on_host = each.device_s.reshape(shape), each.host_s.reshape(shape)
            behind = on_host.max(axis=1) + layer_s > on_device.min(axis=1)
            held = share * each.hidden_s.reshape(shape)
            found += [on_device + held, on_device, np.where(behind[:, None], on_host, 0.0)]
    return np.stack(found, axis=2)


def _worth_trying(vectors: Floats, modes: Sequence[str]) -> list[str]:
    """Return the choices that no other beats, from the figures of none, of each mode everywhere, and of each at a site."""
    none, words, single = vectors[0], vectors[1 : 1 + len(modes)], vectors[1 + len(modes) :]
    by_site: list[list[tuple[str, Floats]]] = []
    for number in range(len(SITES)):
        changes = [np.zeros_like(none), *(single[number * len(modes) : (number + 1) * len(modes)] - none)]
        kept = _undominated(np.stack(changes))
        by_site.append([((NONE, *modes)[index], changes[index]) for index in kept])
    found = [(mode, figures) for mode, figures in zip(modes, words, strict=True)]
    for chosen in product(*by_site):
        names = [name for name, _ in chosen]
        if len(set(names)) > 1 or names[0] == NONE:  # one mode at all sites is its word, which reaches further
            figures = none + np.sum([change for _, change in chosen], axis=0)
            found.append((written(dict(zip(SITES, names, strict=True))), figures))
    rows = _undominated(np.stack([figures for _, figures in found]))
    rows = sorted(rows, key=lambda row: (float(found[row][1].sum()), row))[:MOST]
    return [found[row][0] for row in rows]


def _undominated(vectors: Floats) -> list[int]:
    """Return the rows that no other is as good as in everything; of equals the first."""
    kept: list[int] = []
    for row in np.lexsort((np.arange(len(vectors)), vectors.sum(axis=1))):
        if not any((vectors[other] <= vectors[row]).all() for other in kept):
            kept.append(int(row))
    return kept
