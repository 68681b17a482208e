"""The server of the explorer: Streamlit behind a check of each request's origin. `python -m ui.serve PORT`, started by
`planner ui`.

It answers only requests made to this machine by a loopback name and from its own pages: a web page elsewhere whose name
resolves to 127.0.0.1 (DNS rebinding) sends its own name as Host, and one that connects across sites its own Origin.
Streamlit would compare a foreign Origin with this machine's external address, which it asks a server on the internet
for.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import threading
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from streamlit.starlette import App

from planner.remote.settings import LOOPBACK
from planner.service.guard import SameSite

HERE = Path(__file__).parent
SCRIPTS = Path(str(files("streamlit"))) / "static" / "static" / "js"
# Scripts that draw the first page: Streamlit asks for one when the first such element has arrived.
DRAWING = (
    *("PageLink", "Html", "NumberInput", "Selectbox", "Checkbox", "Metric", "DownloadButton"),
    *("DataFrame", "ArrowVegaLiteChart", "embed"),
)
IMPORTED = re.compile(r"""(?:from|import)[`"']\./([\w.-]+\.js)[`"']""")
PAGES_NEED = ("pandas", "altair", "planner.search.answer", "topology.health.diagnose", "ui.data", "ui.at_once")
WARM = threading.Event()


def settings() -> dict[str, object]:
    """Return the settings of `config.toml` by their dotted names."""
    return dict(_dotted(tomllib.loads((HERE / "config.toml").read_text(encoding="utf-8"))))


def _dotted(table: Mapping[str, Any], section: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += _dotted(value, f"{section}{key}.") if isinstance(value, Mapping) else [(section + key, value)]
    return found


@cache
def _page() -> str:
    """Return Streamlit's page with the address of its server, which it would otherwise search below the page's path
    first, and with the scripts that it will load.
    """
    page = (SCRIPTS.parents[1] / "index.html").read_text(encoding="utf-8")
    asked = [name for name in _with_imports(DRAWING) if name not in page]
    links = (f'<link rel="modulepreload" crossorigin fetchpriority="low" href="/static/js/{name}">' for name in asked)
    head = "<head><script>window.__streamlit = {BACKEND_BASE_URL: window.location.origin}</script>"
    return page.replace("<head>", head, 1).replace("</head>", f"{''.join(links)}</head>", 1)


def _with_imports(names: Iterable[str]) -> list[str]:
    """Return the files of scripts and of what they import; none for a name that this Streamlit does not have."""
    found: dict[str, None] = {}
    wanted = [path.name for name in names for path in SCRIPTS.glob(f"{name}.*.js")]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = None
            wanted += IMPORTED.findall((SCRIPTS / name).read_text(encoding="utf-8"))
    return [*found]


async def _index(request: Request) -> HTMLResponse:
    page = _page()
    if request.url.path == "/" and WARM.is_set():
        from ui import at_once  # noqa: PLC0415 - takes seconds to import, which `_warm` does

        page = page.replace("<body>", f"<body>{at_once.block(request.query_params)}", 1)
    return HTMLResponse(page, headers={"Cache-Control": "no-cache"})


@lru_cache(1024)  # more than Streamlit has; requests for other names must not fill the memory
def _script(name: str) -> bytes | None:
    path = SCRIPTS / name
    return path.read_bytes() if path.parent == SCRIPTS and path.suffix == ".js" and path.is_file() else None


class Scripts:
    """Answer with scripts from memory: a page asks for more than a hundred, and Streamlit has a thread read each."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        below, _, name = scope.get("path", "").rpartition("/")
        content = _script(name) if below == "/static/js" and scope["type"] == "http" else None
        kept = {"Cache-Control": "public, immutable, max-age=31536000"}  # a name changes with the content
        app = self._app if content is None else Response(content, 200, kept, "text/javascript")
        await app(scope, receive, send)


def explorer() -> App:
    """Return the explorer as an ASGI application."""
    pages = [path.stem for path in (HERE / "views").glob("[a-z]*.py")]
    return App(
        HERE / "app.py",
        routes=[Route(f"/{page}", _index) for page in ["", *pages]],
        middleware=[Middleware(SameSite, hosts=LOOPBACK), Middleware(Scripts)],
    )


def _warm() -> None:
    """Prepare results for which the first session would otherwise wait. A failure is shown again on the page that needs
    it.
    """
    for name in PAGES_NEED:
        with contextlib.suppress(Exception):
            import_module(name)
    WARM.set()
    gc.collect()
    gc.freeze()  # Streamlit collects after each run of a page or a part of it: 0.09 s over all that was imported
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
