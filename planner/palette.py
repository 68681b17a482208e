"""One colour for one idea, in every picture, table and page.

Hues are Okabe and Ito's ("Color Universal Design", jfly.uni-koeln.de/color, 2008) less their yellow and black, which
vanish on white and on dark paper, with the wine of Paul Tol's muted scheme (SRON technical note EPS/TN/09-002, 2021),
a brown and a grey. All pairs stay apart under protan, deutan and tritan vision; neighbours are separated by a gap and named in
words all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
WINE = "#882255"
BROWN = "#7A4A12"
GREY = "#BEBEC4"

# Parts of a step. Spans of a timeline use the same words for the same things.
TIME = {
    "compute": BLUE,
    "recompute": SKY,
    "exposed_communication": VERMILION,
    "contention": WINE,
    "copies": PURPLE,
    "bubble": GREY,
    "host": ORANGE,
    "allocator": BROWN,
    "optimizer": GREEN,
}
SPANS = {
    "compute": TIME["compute"],
    "communication": TIME["exposed_communication"],
    "copy": TIME["copies"],
    "wait": TIME["bubble"],
    "host": TIME["host"],
}
# What memory holds. `optimizer` is the same idea as in a step; recomputed values too.
MEMORY = {
    "parameters": BLUE,
    "optimizer": GREEN,
    "gradients": ORANGE,
    "activations": VERMILION,
    "gathered_parameters": PURPLE,
    "gradient_buffers": WINE,
    "loss_and_recompute": SKY,
    "symmetric_buffers": BROWN,
    "reserved": GREY,  # held by the allocator, in use by nothing
}
# What a link is made of, widest first (`topology.cluster.LinkKind`).
LINKS = {
    "nvswitch": GREEN,
    "nvlink": BLUE,
    "c2c": SKY,
    "pcie": ORANGE,
    "smp": PURPLE,
    "network": WINE,
}
# The axes of the mesh, in the order of `simulator.plan.MESH_AXES`, and the experts folded into it.
AXES = {
    "pp": ORANGE,
    "dp_replicate": GREEN,
    "dp_shard": SKY,
    "cp": PURPLE,
    "tp": BLUE,
    "ep": WINE,
}
# How sure a number is (`topology.cluster.Source`), best first.
SOURCES = {
    "measured": GREEN,
    "fitted": BLUE,
    "datasheet": ORANGE,
    "assumed": GREY,
}
SEVERITIES = {"info": SKY, "warning": ORANGE, "error": VERMILION}
BAD = VERMILION  # degraded, absent, over the limit
GOOD = BLUE

FAMILIES = {
    "time": TIME,
    "spans": SPANS,
    "memory": MEMORY,
    "links": LINKS,
    "axes": AXES,
    "sources": SOURCES,
    "severities": SEVERITIES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """What pictures are drawn on and with: page, text, quieter text, rules."""

    page: str
    ink: str
    quiet: str
    rule: str


LIGHT = Paper(page="#FFFFFF", ink="#1B1F24", quiet="#57606A", rule="#D0D7DE")
DARK = Paper(page="#0E1117", ink="#E6EDF3", quiet="#9DA7B1", rule="#3D444D")


def colour(family: str, name: str) -> str:
    """Return the colour of `name` among `FAMILIES[family]`; grey for a name that is not known."""
    return FAMILIES[family].get(name, GREY)


def term_colour(name: str) -> str:
    """Return the colour of a term of a waterfall, whose names are words: `exposed tp communication`, `copies`."""
    if name.startswith("exposed"):
        return TIME["exposed_communication"]
    if name.startswith(("compute", "model FLOPs")):
        return TIME["compute"]
    return colour("time", name.replace(" ", "_"))
