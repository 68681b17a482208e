"""The colours of all pictures, tables and pages: one colour per concept.

Hues are Okabe and Ito's ("Color Universal Design", jfly.uni-koeln.de/color, 2008) without yellow and black, which are
invisible on a white or dark background, with the wine of Paul Tol's muted scheme (SRON technical note EPS/TN/09-002,
2021), a brown and a grey. All pairs are distinguishable with protan, deutan and tritan vision; adjacent areas are also
separated by a gap and labelled.
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
BROWN = "#7A5230"
GREY = "#BEBEC4"

# Terms of a step. Spans of a timeline use the same colours for the same terms.
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
# Categories of memory. `optimizer` and recomputed values have the colours of their terms of a step.
MEMORY = {
    "parameters": BLUE,
    "optimizer": GREEN,
    "gradients": ORANGE,
    "activations": VERMILION,
    "gathered_parameters": PURPLE,
    "gradient_buffers": WINE,
    "loss_and_recompute": SKY,
    "symmetric_buffers": BROWN,
    "reserved": GREY,  # reserved by the allocator, not in use
}
# Kinds of links, fastest first (`topology.cluster.LinkKind`).
LINKS = {"nvswitch": GREEN, "nvlink": BLUE, "c2c": SKY, "pcie": ORANGE, "smp": PURPLE, "network": WINE}
# The axes of the mesh, in the order of `simulator.config.plan.MESH_AXES`, and the experts folded into it.
AXES = {"pp": ORANGE, "dp_replicate": GREEN, "dp_shard": SKY, "cp": PURPLE, "tp": BLUE, "ep": WINE}
# Sources of numbers (`topology.cluster.Source`), best first.
SOURCES = {"measured": GREEN, "fitted": BLUE, "datasheet": ORANGE, "assumed": GREY}
SEVERITIES = {"info": SKY, "warning": ORANGE, "error": VERMILION}
BAD = VERMILION  # degraded, absent, or over the limit
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
    """The colours of a theme: background, text, secondary text, lines."""

    page: str
    ink: str
    quiet: str
    rule: str


LIGHT = Paper(page="#FFFFFF", ink="#1B1F24", quiet="#57606A", rule="#D0D7DE")
DARK = Paper(page="#0E1117", ink="#E6EDF3", quiet="#9DA7B1", rule="#3D444D")


def colour(family: str, name: str) -> str:
    """Return the colour of `name` in `FAMILIES[family]`; grey for an unknown name."""
    return FAMILIES[family].get(name, GREY)
