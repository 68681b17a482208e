"""Start the Streamlit server, and import what the pages need in the background while the browser connects."""

from __future__ import annotations

import contextlib
import threading
from importlib import import_module

PAGES_NEED = (
    "pandas",
    "altair",
    "planner.search.answer",
    "topology.health.diagnose",
    "ui.data",
    "ui.rows",
)


def warm() -> None:
    """Import what the first session would otherwise wait for. A failure shows up again on the page that needs it."""
    for name in PAGES_NEED:
        with contextlib.suppress(Exception):
            import_module(name)


def main() -> None:
    """Run `streamlit` with the arguments of this process."""
    threading.Thread(target=warm, daemon=True, name="warm").start()
    from streamlit.web.cli import main as streamlit  # noqa: PLC0415 - beside the thread, not before it

    streamlit(prog_name="streamlit")


if __name__ == "__main__":
    main()
