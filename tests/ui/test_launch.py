"""`planner ui` serves on this machine only, sends nothing, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from planner import cli
from planner.io import explorer_server as explorer
from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.server import ROOT, free_port, wait_for
from topology.processes import alive, descendants


def start(port, tmp_path):
    return subprocess.Popen(
        [sys.executable, "-m", "planner", "ui", "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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


def test_every_setting_of_the_file_reaches_the_server():
    """Streamlit knows each flag: a wrong one would end the server with a usage error."""
    from streamlit import config

    words = explorer.command(8601)
    flags = {word.removeprefix("--"): words[i + 1] for i, word in enumerate(words) if word.startswith("--")}

    assert flags["server.address"] == "127.0.0.1"
    assert flags["browser.gatherUsageStats"] == "false"
    assert flags["server.enableXsrfProtection"] == "true"
    known = set(config.get_config_options())
    assert {name for name in flags if name not in known} == set()
    assert json.loads(flags["theme.headingFontSizes"])


def test_a_folder_full_of_traps_is_not_imported(tmp_path):
    """A `streamlit.py` or `planner.py` in the folder it is started from is somebody else's."""
    (tmp_path / "streamlit.py").write_text("raise SystemExit('trapped')")
    words = explorer.command(8602)
    check = [words[0], "-P", "-c", "import streamlit, planner, ui; print(planner.__file__)"]
    done = subprocess.run(
        check, cwd=tmp_path, env=explorer.environment(), capture_output=True, text=True, timeout=60, check=True
    )

    assert str(ROOT) in done.stdout
