"""Charts of the machine: parts and links of a node, rates between pairs of GPUs, ranks on nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, TypedDict

import altair as alt
import numpy as np

from planner.pictures.node_layout import LINK_WORDS, NodeView, degraded
from planner.pictures.palette import BAD, LINKS, colour
from simulator.config.plan import MESH_AXES, Plan
from topology.units import in_gb_per_s
from ui.charts.loads import LEVELS, UNKNOWN, level, percent
from ui.charts.look import Figure, finished, ink_on, paper, table, tips

ROW = 92  # pixels between rows of the picture
# Okabe and Ito's hues for group numbers, ordered so that adjacent numbers differ most.
GROUPS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#882255", "#BEBEC4")
AXIS_NAMES = {
    "pp": "pipeline stage",
    "dp_replicate": "replica",
    "dp_shard": "FSDP shard",
    "cp": "context",
    "tp": "tensor",
}
SHOWN_NODES = 32  # one page; the remaining nodes follow the same pattern


def node(
    view: NodeView,
    *,
    dark: bool,
    ranks: dict[int, tuple[str, int]] | None = None,
    shares: dict[int, float] | None = None,
) -> Figure:
    """Draw a node. `ranks` has, by GPU index, its label and the number of the group that decides its colour.

    With `shares`, links are coloured by their mean load, by the cable's id, and not by their kind.
    """
    p = paper(dark)
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[-0.7, view.width - 0.3], nice=False, zero=False))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[view.height - 0.5, -0.5], nice=False, zero=False))
    kinds = [kind for kind in LINKS if any(cable.kind == kind for cable in view.cables)]
    layers: list[alt.Chart] = []
    lines = [
        {
            "link": cable.id,
            "step": step,
            "x": px,
            "y": py,
            "kind": LINK_WORDS[cable.kind],
            "what": f"{cable.a} to {cable.b}",
            "class": cable.label or "-",
            "links": cable.count,
            "planned": in_gb_per_s(cable.planned),
            "nominal": in_gb_per_s(cable.nominal),
            "measured": in_gb_per_s(cable.measured) if cable.measured else "not measured",
            "state": cable.state,
            "source": cable.source,
            "wide": _width(cable.planned),
            "bad": degraded(cable),
            **({} if shares is None else _loaded(shares.get(cable.id))),
        }
        for cable in view.cables
        for step, (px, py) in enumerate(cable.points)
    ]
    shown = dict.fromkeys(("what", "kind", "class", "links", "nominal", "measured", "state", "source"), "")
    if lines:
        colours = alt.Scale(domain=[LINK_WORDS[k] for k in kinds], range=[colour("links", k) for k in kinds])
        if shares is not None:
            shown = {"load": "mean load", **shown}
            levels = [(words, hue) for _, words, hue in LEVELS if any(line["level"] == words for line in lines)]
            levels += [(UNKNOWN, p.rule)] if any(line["level"] == UNKNOWN for line in lines) else []
            colours = alt.Scale(domain=[words for words, _ in levels], range=[hue for _, hue in levels])
        base = alt.Chart(table(lines)).encode(
            x=x, y=y, detail=alt.Detail("link:N"), order=alt.Order("step:Q"), tooltip=tips(shown)
        )
        layers.append(
            base.mark_line(strokeCap="round", opacity=0.85).encode(
                color=alt.condition(
                    "datum.bad",
                    alt.value(BAD),
                    alt.Color(
                        "kind:N" if shares is None else "level:N",
                        scale=colours,
                        legend=alt.Legend(title=None, columns=2, symbolType="stroke", symbolStrokeWidth=4),
                    ),
                ),
                size=alt.Size("wide:Q", scale=None, legend=None),
                strokeDash=alt.condition("datum.bad", alt.value([4, 4]), alt.value([1, 0])),
            )
        )
    layers += _parts(view, x, y, p.page, p.ink, p.quiet, ranks)
    return finished(alt.layer(*layers), dark, height=int(ROW * view.height) + 20)


def _loaded(share: float | None) -> dict[str, str | float]:
    """Return what a line shows of a link's mean load; None where it is not counted."""
    if share is None:
        return {"load": UNKNOWN, "level": UNKNOWN, "wide": 1.0}
    return {"load": percent(share), "level": level(share)[0], "wide": 1.5 + 8 * min(1.0, share)}


def _width(bytes_per_s: float) -> float:
    """Return a line width that grows with the rate: 1 pixel for 1 GB/s, 5 for 450."""
    return min(6.0, max(1.0, (bytes_per_s / 1e9) ** 0.27)) if bytes_per_s else 1.0


# Position of a part's name: next to parts in the middle, so that no line crosses it.
class _Side(TypedDict, total=False):
    dx: float
    dy: float
    align: Literal["left"]


_SIDES: dict[str, _Side] = {"above": {"dy": -17}, "below": {"dy": 19}, "right": {"dx": 11, "dy": -9, "align": "left"}}


def _parts(
    view: NodeView, x: Any, y: Any, page: str, ink: str, quiet: str, ranks: dict[int, tuple[str, int]] | None
) -> Iterator[alt.Chart]:
    many = view.width > 17
    crowded = sum(part.kind == "nic" for part in view.parts) > 10
    round_size = 900 if view.width <= 10 else 460
    rows = [
        {
            "x": part.x,
            "y": part.y,
            "label": part.label if part.kind != "gpu" or ranks is None else ranks.get(part.index, ("", 0))[0],
            "about": part.about,
            "kind": part.kind,
            "fill": GROUPS[ranks[part.index][1] % len(GROUPS)] if ranks and part.index in ranks else page,
            "on": ink_on(GROUPS[ranks[part.index][1] % len(GROUPS)]) if ranks and part.index in ranks else ink,
            "edge": ink if part.healthy else BAD,
        }
        for part in view.parts
    ]
    gpus = [row for row in rows if row["kind"] == "gpu"]
    rest = [row for row in rows if row["kind"] != "gpu"]
    tooltip = tips({"about": "part"})
    if rest:
        base = alt.Chart(table(rest)).encode(x=x, y=y, tooltip=tooltip)
        yield base.mark_point(
            filled=True, fillOpacity=1, strokeWidth=1.2, shape="square", size=60 if many else 170
        ).encode(fill=alt.Fill("fill:N", scale=None), stroke=alt.Stroke("edge:N", scale=None))
        for row in rest:
            row["side"] = {"nvswitch": "above", "cpu": "below", "nic": "below"}.get(str(row["kind"]), "right")
        for side, how in _SIDES.items():
            named = [
                row
                for row in rest
                if row["side"] == side and not (many and side != "above") and not (crowded and row["kind"] == "nic")
            ]
            if named:
                words = alt.Chart(table(named)).encode(x=x, y=y, text=alt.Text("label:N"))
                fitting = alt.ExprRef(f"width < {30 + 52 * view.width:.0f} ? 0 : 1")
                # An outline in the background colour keeps lines from crossing the letters.
                yield words.mark_text(stroke=page, strokeWidth=4, fontSize=11, opacity=fitting, **how)
                yield words.mark_text(color=quiet, fontSize=11, opacity=fitting, **how)
    if gpus:
        base = alt.Chart(table(gpus)).encode(x=x, y=y, tooltip=tooltip)
        yield base.mark_point(filled=True, fillOpacity=1, strokeWidth=1.6, size=120 if many else round_size).encode(
            fill=alt.Fill("fill:N", scale=None), stroke=alt.Stroke("edge:N", scale=None)
        )
        if not many:
            yield base.mark_text(fontSize=12, fontWeight="bold").encode(
                text=alt.Text("label:N"), color=alt.Color("on:N", scale=None)
            )


FAMILIES = {"PIX": "pcie", "PXB": "pcie", "PHB": "pcie", "NODE": "pcie", "SYS": "smp"}  # other classes are NVLink's
FAMILY_WORDS = {"nvswitch": "NVLink, switched", "nvlink": "NVLink", "pcie": "PCIe", "smp": "between sockets"}


def pairs(rows: list[dict[str, object]], *, switched: bool, dark: bool) -> Figure:
    """Draw what joins each pair of GPUs: coloured by kind, stronger where faster, labelled with the class where it
    fits.

    `switched` says that NVLink goes through switches.
    """
    p = paper(dark)
    count = len({row["from"] for row in rows})
    few = count <= 10
    rates = [float(str(row["rate"])) for row in rows if row["rate"]]
    top = max(rates, default=1.0)
    values = []
    for row in rows:
        name = str(row["class"])
        if name == "self":
            continue
        family = FAMILIES.get(name, "nvswitch" if switched else "nvlink") if name != "not read" else "unknown"
        values.append(
            {
                **row,
                "text": in_gb_per_s(float(str(row["rate"])) if row["rate"] else None),
                "kind": FAMILY_WORDS.get(family, "not read"),
                "on": ink_on(colour("links", family)),
                "strength": 1.0 if few or not row["rate"] else 0.35 + 0.65 * float(str(row["rate"])) / top,
            }
        )
    kinds = [
        name
        for name in (*FAMILY_WORDS, "unknown")
        if any(v["kind"] == FAMILY_WORDS.get(name, "not read") for v in values)
    ]
    axis = partial(alt.Axis, labelAngle=0, grid=False, domain=False, ticks=False)
    if count > 16:
        axis = partial(axis, values=list(range(0, count, 8)))
    base = alt.Chart(table(values)).encode(
        x=alt.X("to:O", title="to GPU", axis=axis(orient="top")),
        y=alt.Y("from:O", title="from GPU", axis=axis()),
        tooltip=tips({"from:O": "", "to:O": "", "class": "", "kind": "", "text": "one transfer, one direction"}),
    )
    boxes = base.mark_rect(cornerRadius=3 if few else 0, stroke=p.page, strokeWidth=2 if few else 0).encode(
        color=alt.Color(
            "kind:N",
            title=None,
            scale=alt.Scale(
                domain=[FAMILY_WORDS.get(name, "not read") for name in kinds],
                range=[colour("links", name) for name in kinds],
            ),
        ),
        opacity=alt.Opacity("strength:Q", scale=None, legend=None),
    )
    layers = [boxes]
    if few:
        size = 11 if count <= 8 else 10
        words = base.mark_text(fontSize=size, fontWeight="bold")
        layers.append(words.encode(text=alt.Text("class:N"), color=alt.Color("on:N", scale=None)))
    return finished(alt.layer(*layers), dark, height=max(220, min(520, 44 * count + 60)))


def placement(rows: list[dict[str, int]], axis: str, *, dark: bool) -> Figure:
    """Draw ranks on nodes: a row per node, a column per GPU, coloured by the coordinate along one mesh axis."""
    p = paper(dark)
    nodes = len({row["node"] for row in rows})
    columns = len({row["gpu"] for row in rows})
    values = [
        {**row, "colour": hue, "on": ink_on(hue), "group": row[axis]}
        for row in rows
        for hue in (GROUPS[row[axis] % len(GROUPS)],)
    ]
    base = alt.Chart(table(values)).encode(
        x=alt.X(
            "gpu:O",
            title="GPU of the node",
            axis=alt.Axis(orient="top", labelAngle=0, grid=False, domain=False, ticks=False),
        ),
        y=alt.Y("node:O", title="node", axis=alt.Axis(grid=False, domain=False, ticks=False)),
        tooltip=tips(
            {"rank:Q": "", "node:O": "", "gpu:O": "GPU", **{f"{n}:O": title for n, title in AXIS_NAMES.items()}}
        ),
    )
    boxes = base.mark_rect(cornerRadius=3, stroke=p.page, strokeWidth=2).encode(color=alt.Color("colour:N", scale=None))
    layers = [boxes]
    if columns <= 16:
        words = base.mark_text(fontSize=11, fontWeight="bold")
        layers.append(words.encode(text=alt.Text("group:Q"), color=alt.Color("on:N", scale=None)))
    return finished(alt.layer(*layers), dark, height=max(110, min(620, 22 * nodes + 60)))


def placement_rows(plan: Plan, gpus_per_node: int) -> list[dict[str, int]]:
    """Return one row per rank on the first `SHOWN_NODES` nodes: rank, node, gpu and its coordinate along every mesh
    axis.

    The mapping is `simulator.config.plan.rank_grid`'s: C order over `MESH_AXES`; `plan.placement` moves ranks between
    GPUs.
    """
    shape = tuple(int(getattr(plan, axis)) for axis in MESH_AXES)
    place = plan.placement or range(plan.gpus)
    rows = []
    for rank, where in enumerate(place):
        node, gpu = divmod(int(where), gpus_per_node)
        if node >= SHOWN_NODES:
            continue
        at = np.unravel_index(rank, shape)
        rows.append({"rank": rank, "node": node, "gpu": gpu, **{a: int(c) for a, c in zip(MESH_AXES, at, strict=True)}})
    return rows


def axes_used(plan: Plan) -> list[str]:
    """Return the mesh axes larger than one, those that span most nodes first."""
    return [axis for axis in MESH_AXES if int(getattr(plan, axis)) > 1]
