"""`planner ui` serves on this machine only, sends nothing, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from planner import cli
from planner.io import explorer_server as explorer
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.server import ROOT, free_port, wait_for
from topology.processes import alive, descendants


def start(port, tmp_path, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "planner", "ui", "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # `nohup` has everybody ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # noqa: PLW1509 - there is one thread
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_it_leaves_no_process(tmp_path, number):
    port = free_port()
    process = start(port, tmp_path)
    wait_for(f"http://127.0.0.1:{port}", process)
    servers = descendants(process.pid)
    assert servers

    process.send_signal(number)  # to the parent alone, which is harder than a terminal's Ctrl-C to all
    assert process.wait(20) == 130
    assert not any(alive(server) for server in servers)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_the_server_ends_with_its_parent(tmp_path, number):
    """Neither signal gives the parent time to end anything."""
    port = free_port()
    process = start(port, tmp_path)
    wait_for(f"http://127.0.0.1:{port}", process)
    servers = descendants(process.pid)
    assert servers

    process.send_signal(number)
    process.wait(20)
    _, left = psutil.wait_procs(servers, timeout=20)
    assert left == []


@pytest.mark.slow
def test_it_listens_on_this_machine_only(tmp_path):
    port = free_port()
    process = start(port, tmp_path)
    try:
        wait_for(f"http://127.0.0.1:{port}", process)
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex(("127.0.0.2", port)) != 0
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)


def test_without_its_packages_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(explorer, "find_spec", lambda name: None)

    assert cli.main(["ui"]) == 2
    said = capsys.readouterr().err
    assert "streamlit" in said
    assert "pip install 'meshwright[ui]'" in said


def test_a_port_in_use_is_named_with_another(capsys):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]

        assert cli.main(["ui", "--port", str(port)]) == 2
    assert f"--port {port + 1}" in capsys.readouterr().err


def test_every_setting_of_the_file_is_one_of_streamlit():
    from streamlit import config

    from ui.serve import settings

    found = settings()

    assert found["server.address"] == "127.0.0.1"
    assert found["browser.gatherUsageStats"] is False
    assert found["server.enableXsrfProtection"] is True
    assert found["theme.headingFontSizes"]
    assert set(found) <= set(config.get_config_options())


HOSTS = ["127.0.0.1:8501", "localhost:8501", "localhost"]


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("host", "origin", "passes"),
    [
        *[(host, None, True) for host in HOSTS],
        *[(host, f"http://{host}", True) for host in HOSTS],
        ("rebound.example", None, False),
        ("rebound.example", "http://rebound.example", False),  # same origin, as DNS rebinding has it
        ("127.0.0.1.rebound.example:8501", "http://127.0.0.1.rebound.example:8501", False),
        ("localhost@rebound.example", None, False),
        ("rebound.example\\@localhost", None, False),
        ("localhost:port", None, False),
        ("localhost/", None, False),
        ("[::1", None, False),
        ("", None, False),
        ("127.0.0.1:8501", "http://elsewhere.example", False),
        ("127.0.0.1:8501", "http://127.0.0.1:3000", False),  # another program's page on this machine
        ("127.0.0.1:8501", "null", False),
    ],
)
def test_only_pages_of_this_machine_are_answered(kind, host, origin, passes):
    assert asyncio.run(status(kind, host, origin)) == (200 if passes else 403)


async def status(kind, host, origin):
    """Return the status that an application behind the explorer's check answers with."""
    from ui.serve import LOOPBACK, SameSite

    sent = []

    async def inner(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    headers = [(b"host", host.encode())] + ([(b"origin", origin.encode())] if origin else [])
    await SameSite(inner, LOOPBACK)({"type": kind, "headers": headers, "extensions": {}}, None, send)
    return sent[0]["status"]


@pytest.mark.slow
def test_a_foreign_page_gets_no_socket_and_causes_no_traffic(tmp_path):
    """Streamlit asks a server on the internet for this machine's address when it meets a foreign Origin: the proxy that
    would carry the request is ours, and hears nothing.
    """
    port, proxy = free_port(), socket.socket()
    proxy.bind(("127.0.0.1", 0))
    proxy.listen()
    proxy.settimeout(2)
    through = f"http://127.0.0.1:{proxy.getsockname()[1]}"
    process = start(port, tmp_path, http_proxy=through, https_proxy=through)
    try:
        wait_for(f"http://127.0.0.1:{port}", process)
        assert handshake(port, f"127.0.0.1:{port}", f"http://127.0.0.1:{port}") == 101
        assert handshake(port, f"127.0.0.1:{port}", "http://elsewhere.example") == 403
        assert handshake(port, f"rebound.example:{port}", f"http://rebound.example:{port}") == 403
        with pytest.raises(TimeoutError):
            proxy.accept()
    finally:
        proxy.close()
        process.send_signal(signal.SIGINT)
        process.wait(20)


def handshake(port, host, origin):
    """Return the status of a WebSocket handshake with such headers."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        headers = [
            "GET /_stcore/stream HTTP/1.1",
            f"Host: {host}",
            f"Origin: {origin}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Protocol: streamlit",
        ]
        line.sendall("\r\n".join([*headers, "", ""]).encode())
        return int(line.recv(4096).split()[1])


def test_a_folder_full_of_traps_is_not_imported(tmp_path):
    """A `streamlit.py` or `planner.py` in the folder it is started from is somebody else's."""
    (tmp_path / "streamlit.py").write_text("raise SystemExit('trapped')")
    words = explorer.command(8602)
    check = [words[0], "-P", "-c", "import streamlit, planner, ui; print(planner.__file__)"]
    done = subprocess.run(
        check, cwd=tmp_path, env=explorer.environment(), capture_output=True, text=True, timeout=60, check=True
    )

    assert str(ROOT) in done.stdout
