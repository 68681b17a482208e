"""The server's entry: loads what the pages need while the browser is still on its way, then hands over to Streamlit."""

from __future__ import annotations

import contextlib
import threading
from importlib import import_module

PAGES_NEED = ("pandas", "altair", "planner.commands.suggest", "planner.search", "topology.health", "ui.data", "ui.rows")


def warm() -> None:
    """Import what the first session would otherwise wait for. What fails here fails there too, and is shown there."""
    for name in PAGES_NEED:
        with contextlib.suppress(Exception):
            import_module(name)


def main() -> None:
    """Run `streamlit` with this process's arguments."""
    threading.Thread(target=warm, daemon=True, name="warm").start()
    from streamlit.web.cli import main as streamlit  # noqa: PLC0415 - beside the thread, not before it

    streamlit(prog_name="streamlit")


if __name__ == "__main__":
    main()
