"""What the explorer's server sends before a page runs: the page itself, and the scripts that draw it."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing


def test_the_page_asks_early_for_all_that_draws_it():
    """Each script that it names is there, and so is all that it imports, which would be asked for late."""
    from ui import serve

    page = serve._page()
    named = set(re.findall(r"static/js/([\w.-]+\.js)", page))
    imported = {found for name in named for found in serve.IMPORTED.findall(serve._script(name).decode())}

    assert imported <= named
    for drawing in serve.DRAWING:
        assert any(name.startswith(f"{drawing}.") for name in named), drawing
    assert page.index("modulepreload") > page.index('type="module"')  # what starts the page comes first


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("/static/js/{name}", True),
        ("/static/js/none.js", False),
        ("/static/js/..", False),
        ("/static/js/../../index.html", False),
        ("/static/css/{name}", False),
        ("/{name}", False),
    ],
)
def test_scripts_come_from_memory_and_all_else_from_streamlit(path, ours):
    from ui import serve

    name = next(serve.SCRIPTS.glob("Metric.*.js")).name
    sent = []

    async def streamlit(scope, receive, send):
        await send({"type": "streamlit"})

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path.format(name=name), "headers": []}
    asyncio.run(serve.Scripts(streamlit)(scope, None, send))

    if not ours:
        assert sent == [{"type": "streamlit"}]
        return
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/javascript")
    assert b"immutable" in headers[b"cache-control"]
    assert sent[1]["body"] == (serve.SCRIPTS / name).read_bytes()
