"""The server of the explorer: Streamlit behind a check of who asks. `python -m ui.serve PORT`, started by `planner ui`.

It answers only requests made to this machine by a loopback name and from its own pages: a web page elsewhere whose name
resolves to 127.0.0.1 (DNS rebinding) sends its own name as Host, and one that connects across sites its own Origin.
Streamlit would compare a foreign Origin with this machine's external address, which it asks a server on the internet
for.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import tomllib
from collections.abc import Mapping
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route
from streamlit.starlette import App

from planner.remote.settings import LOOPBACK
from planner.service.guard import SameSite

HERE = Path(__file__).parent
PAGES_NEED = (
    "pandas",
    "altair",
    "planner.search.answer",
    "topology.health.diagnose",
    "ui.data",
    "ui.rows",
)


def settings() -> dict[str, object]:
    """Return the settings of `config.toml` by their dotted names."""
    return dict(_dotted(tomllib.loads((HERE / "config.toml").read_text(encoding="utf-8"))))


def _dotted(table: Mapping[str, Any], section: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += _dotted(value, f"{section}{key}.") if isinstance(value, Mapping) else [(section + key, value)]
    return found


async def _index(_request: Request) -> HTMLResponse:
    """Return Streamlit's page with the address of its server, which it would look for below a page's path first."""
    page = (files("streamlit") / "static" / "index.html").read_text(encoding="utf-8")
    head = "<head><script>window.__streamlit = {BACKEND_BASE_URL: window.location.origin}</script>"
    return HTMLResponse(page.replace("<head>", head, 1), headers={"Cache-Control": "no-cache"})


def explorer() -> App:
    """Return the explorer as an ASGI application."""
    pages = [path.stem for path in (HERE / "views").glob("[a-z]*.py")]
    return App(
        HERE / "app.py",
        routes=[Route(f"/{page}", _index) for page in ["", *pages]],
        middleware=[Middleware(SameSite, hosts=LOOPBACK)],
    )


def _warm() -> None:
    """Prepare what the first session would otherwise wait for. A failure shows up again on the page that needs it."""
    for name in PAGES_NEED:
        with contextlib.suppress(Exception):
            import_module(name)
    with contextlib.suppress(Exception):
        import_module("ui.background.waiting").workers().warm()
    with contextlib.suppress(Exception):
        import_module("ui.data").prepare()


def _end_with_parent() -> None:
    """End this process when its standard input ends: `planner ui` holds the other end, however it is killed."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    """Serve on the port given as argument, until interrupted or the parent ends."""
    threading.Thread(target=_end_with_parent, daemon=True, name="parent").start()
    threading.Thread(target=_warm, daemon=True, name="warm").start()
    explorer().run(config={**settings(), "server.port": int(sys.argv[1])})


if __name__ == "__main__":
    main()
