"""A small canvas that writes SVG with xml.etree, which escapes all text: boxes, lines and text in two themes.

Colours of concepts are attributes. Colours of the theme (background, text, lines) are CSS classes, so that one file
follows the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree as ET

from planner.io.printable import printable
from planner.pictures.palette import DARK, LIGHT, Paper

MARGIN = 24.0
FONT_PX = 13
LETTER_PX = 7.2  # average width of a letter at that size


def _rules(paper: Paper) -> str:
    return (
        f".page{{fill:{paper.page}}}.ink{{fill:{paper.ink}}}.quiet{{fill:{paper.quiet}}}"
        f".edge{{stroke:{paper.page}}}.rule{{stroke:{paper.rule}}}.box{{fill:{paper.page};stroke:{paper.quiet}}}"
    )


STYLE = (
    f"text{{font:{FONT_PX}px system-ui,-apple-system,'Segoe UI',sans-serif}}.head{{font-weight:600;font-size:16px}}"
    f"{_rules(LIGHT)}@media(prefers-color-scheme:dark){{{_rules(DARK)}}}"
)


class Picture:
    """An SVG under construction; `text()` finishes it. Lengths are CSS pixels, y grows downwards."""

    def __init__(self, width: float, height: float, title: str, about: str) -> None:
        self.width, self.height = width, height
        self.root = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {width:g} {height:g}",
                "width": f"{width:g}",
                "height": f"{height:g}",
                "role": "img",
            },
        )
        self._words(self.root, "title", title)
        self._words(self.root, "desc", about)
        ET.SubElement(self.root, "style").text = STYLE
        self._add("rect", {"width": "100%", "height": "100%", "class": "page"})
        self.write(MARGIN, MARGIN + 8, shortened(title, width - 2 * MARGIN), kind="ink head")

    def box(self, x: float, y: float, width: float, height: float, fill: str = "", about: str = "") -> None:
        """Draw a filled bar, or an outlined box without `fill`, with a gap to its neighbours."""
        look = {"fill": fill, "class": "edge"} if fill else {"class": "box"}
        place = {"x": _px(x), "y": _px(y), "width": _px(max(width, 0.0)), "height": _px(height), "rx": "3"}
        self._add("rect", place | look, about)

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """Draw a bar without a gap to its neighbours and wide enough to be visible, for lanes with thousands of
        bars.
        """
        place = {"x": f"{x:.2f}", "y": _px(y), "width": f"{max(width, 0.3):.2f}", "height": _px(height)}
        self._add("rect", place | {"fill": fill})

    def line(
        self,
        points: Iterable[tuple[float, float]],
        stroke: str,
        width: float = 1.5,
        *,
        dashed: bool = False,
        about: str = "",
    ) -> None:
        """Draw a line through points; with an empty `stroke` in the line colour of the theme."""
        look = {"points": " ".join(f"{_px(x)},{_px(y)}" for x, y in points), "fill": "none", "stroke-width": _px(width)}
        look |= {"stroke": stroke} if stroke else {"class": "rule"}
        self._add("polyline", look | ({"stroke-dasharray": "5 4"} if dashed else {}), about)

    def write(self, x: float, y: float, text: str, *, kind: str = "ink", anchor: str = "start") -> None:
        """Write one line of text; `kind` is ink (text) or quiet (secondary text), `anchor` start, middle or end."""
        look = {"x": _px(x), "y": _px(y), "class": kind} | ({"text-anchor": anchor} if anchor != "start" else {})
        ET.SubElement(self.root, "text", look).text = printable(text).replace("\n", " ")

    def _add(self, tag: str, attributes: dict[str, str], about: str = "") -> None:
        element = ET.SubElement(self.root, tag, attributes)
        if about:
            self._words(element, "title", about)

    @staticmethod
    def _words(parent: ET.Element, tag: str, text: str) -> None:
        ET.SubElement(parent, tag).text = printable(text)

    def text(self) -> str:
        ET.indent(self.root)
        return ET.tostring(self.root, encoding="unicode") + "\n"


def _px(value: float) -> str:
    return f"{round(value, 1):g}"


def shortened(text: str, width: float) -> str:
    """Return `text` cut to `width` pixels, with an ellipsis if it was cut."""
    letters = max(4, int(width / LETTER_PX))
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


def legend(picture: Picture, x: float, y: float, entries: Iterable[tuple[str, str]]) -> float:
    """Write a legend of (label, colour) entries, wrapped at the right margin; return the y below it."""
    at = x
    for name, colour in entries:
        width = 26 + len(name) * LETTER_PX
        if at > x and at + width > picture.width - MARGIN:
            at, y = x, y + 22
        picture.box(at, y - 10, 12, 12, colour)
        picture.write(at + 18, y, name)
        at += width + 10
    return y + 22


def stacked(*pictures: Picture) -> str:
    """Return pictures as one SVG, each below the last."""
    whole = Picture(max(part.width for part in pictures), sum(part.height for part in pictures), "", "")
    whole.root[:] = []  # the parts have their own titles and backgrounds
    y = 0.0
    for part in pictures:
        part.root.set("y", _px(y))
        whole.root.append(part.root)
        y += part.height
    return whole.text()
