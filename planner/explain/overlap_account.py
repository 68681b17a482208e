"""What the overlap mode of each tensor-parallel communication saves: the step with the mode compared with the step
without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simulator.analytical.estimates import EstimateTable
from simulator.config.overlap_sites import NONE, SITES, modes_by_site, written
from simulator.config.plan import Plan

OUTSIDE_LAYERS = "embedding and head"


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteOverlap:
    """One communication: seconds of a step that its mode hides, and seconds by which the step is shorter.

    The latter is smaller if the overlapped matrix products take longer, or if the host issues more kernels. `site` is
    one of `simulator.config.overlap_sites.SITES`, or ENDS for the communications outside layers.
    """

    site: str
    mode: str
    hides_s: float
    saves_s: float


def overlap_by_site(plan: Plan, cost: Callable[[Sequence[Plan]], EstimateTable]) -> tuple[SiteOverlap, ...]:
    """Return the saving of each site's mode alone, in the order of a layer; empty if nothing overlaps."""
    modes = modes_by_site(plan.tp_overlap)
    if plan.tp == 1 or set(modes) == {NONE}:
        return ()
    texts = [NONE, *(written({site: mode}) for site, mode in zip(SITES, modes, strict=True)), plan.tp_overlap]
    table = cost([replace(plan, tp_overlap=text) for text in texts])
    hides = table.exposed_by_axis_s["tp"][0] - table.exposed_by_axis_s["tp"]
    saves = table.step_s[0] - table.step_s
    found = [
        SiteOverlap(site=site, mode=mode, hides_s=float(hides[number]), saves_s=float(saves[number]))
        for number, (site, mode) in enumerate(zip(SITES, modes, strict=True), start=1)
    ]
    ends_hidden_s = float(hides[-1] - hides[1:-1].sum())
    if len(set(modes)) == 1 and ends_hidden_s > 0:
        ends_saved_s = float(saves[-1] - saves[1:-1].sum())
        found.append(SiteOverlap(site=OUTSIDE_LAYERS, mode=modes[0], hides_s=ends_hidden_s, saves_s=ends_saved_s))
    return tuple(found)
