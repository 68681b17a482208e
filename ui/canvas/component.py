"""The timeline component of a page: `timeline.js` draws the payload of `ui.canvas.payload`."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from topology.codec import JsonObject

_HERE = Path(__file__).parent
_MOUNT = st.components.v2.component(
    "meshwright_timeline",
    html=(_HERE / "timeline.html").read_text(encoding="utf-8"),
    css=(_HERE / "timeline.css").read_text(encoding="utf-8"),
    js=(_HERE / "timeline.js").read_text(encoding="utf-8"),
)


def window_of(key: str, length_s: float) -> tuple[float, float]:
    """Return the window (s) that the browser requested; the whole step without a valid request."""
    kept = st.session_state.get(key)
    asked = kept.get("window") if isinstance(kept, dict) else getattr(kept, "window", None)
    if isinstance(asked, list) and len(asked) == 2 and all(isinstance(one, int | float) for one in asked):
        begin, finish = max(0.0, float(asked[0])), min(length_s, float(asked[1]))
        if finish > begin:
            return begin, finish
    return 0.0, length_s


def timeline(drawn: JsonObject, *, key: str) -> None:
    """Draw a timeline."""
    _MOUNT(key=key, data=drawn, on_window_change=lambda: None)
