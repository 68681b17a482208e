"""What all charts share: the colours of the theme, colour scales of the palette, numbers with their units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

# Imported early, although not used here: altair checks for pandas, and must not find it half imported by a session.
import pandas as pd  # noqa: F401
from altair.utils import schemapi

from planner.pictures.palette import DARK, LIGHT, Paper, colour
from topology.units import in_gb_per_s

# A page draws a dozen charts in each run, and validating them would take two thirds of the time. Tests validate them
# (`to_dict`).
schemapi.disable_debug_mode()
alt.theme.enable("none")  # sizes come from pages

Figure = alt.Chart | alt.LayerChart | alt.FacetChart | alt.VConcatChart
PICK = "pick"  # the selection of charts whose marks are plans
ABBREVIATIONS = frozenset({"dp", "cp", "tp", "pp", "ep"})
FONT = "Source Sans, Source Sans Pro, sans-serif"


def paper(dark: bool) -> Paper:
    return DARK if dark else LIGHT


def contrast(first: str, second: str) -> float:
    """Return the contrast of two colours by WCAG 2.2: 1 to 21; text needs 4.5."""
    dim, bright = sorted((_luminance(first), _luminance(second)))
    return (bright + 0.05) / (dim + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(colour: str) -> str:
    """Return black or white, whichever is easier to read on `colour`: the contrast is at least 4.58 on any."""
    return max(("#000000", "#FFFFFF"), key=lambda ink: contrast(ink, colour))


def scale(family: str, names: Iterable[str]) -> alt.Scale:
    """Return a colour scale over `names` of a palette family, in the order given."""
    shown = list(dict.fromkeys(names))
    return alt.Scale(domain=shown, range=[colour(family, name.replace(" ", "_")) for name in shown])


def words(name: str) -> str:
    """Return a key in words: `exposed_tp_communication` becomes `exposed TP communication`."""
    return " ".join(word.upper() if word in ABBREVIATIONS else word for word in name.replace("_", " ").split(" "))


def rate_range(bytes_per_s: Sequence[float]) -> str:
    """Return the least and the greatest of several rates, or one where they agree: `377 to 380 GB/s`."""
    low, high = in_gb_per_s(min(bytes_per_s)), in_gb_per_s(max(bytes_per_s))
    return low if low == high else f"{low.removesuffix(' GB/s')} to {high}"


def table(rows: Iterable[Mapping[str, Any]]) -> alt.Data:
    """Return rows as the data of a chart. As a tuple: altair would copy a list for each layer and encoding."""
    return alt.Data(values=tuple(dict(row) for row in rows))


def tips(shown: Mapping[str, str]) -> list[alt.Tooltip]:
    """Return what is shown where a mark is pointed at: fields with their titles, or with their own name for an empty
    one. A field is a name, or one with its type: `rank:Q`.
    """
    fields = {name if ":" in name else f"{name}:N": title for name, title in shown.items()}
    return [alt.Tooltip(name, title=title) if title else alt.Tooltip(name) for name, title in fields.items()]


def picked() -> alt.Parameter:
    """Return the selection of one plan by a click on its mark."""
    return alt.selection_point(name=PICK, fields=["plan"], on="click", toggle=False)


def finished(chart: Figure, dark: bool, *, height: int | alt.Step) -> Figure:
    """Return the chart, `height` pixels high, with axes and text in the colours of the theme, and no frame."""
    p = paper(dark)
    text: dict[str, Any] = {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titleColor": p.quiet,
    }
    # Set in place: altair's `properties`, and each `configure_`, would copy all layers.
    chart.height = height
    chart.config = alt.Config(
        background="transparent",
        font=FONT,
        view=alt.ViewConfig(strokeWidth=0),
        axis=alt.AxisConfig(
            labelColor=p.quiet, gridColor=p.rule, gridOpacity=0.5, domainColor=p.rule, tickColor=p.rule, **text
        ),
        axisX=alt.AxisConfig(tickCount=alt.ExprRef("max(3, ceil(width / 80))"), labelBound=True),
        axisY=alt.AxisConfig(labelPadding=6),
        legend=alt.LegendConfig(labelColor=p.ink, orient="top", offset=4, columnPadding=16, **text),
    )
    return chart
