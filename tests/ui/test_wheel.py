"""The explorer works from an installed package, not only from a checkout: settings and pages are in the wheel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT
from tests.ui.server import free_port, wait_for
from topology.processes import descendants

PACKAGES = ("topology", "simulator", "planner", "executor", "ui")
PARTS = (*PACKAGES, "pyproject.toml", "README.md", "LICENSE")
OPEN = """
from pathlib import Path
from streamlit.testing.v1 import AppTest
import ui
test = AppTest.from_file(Path(ui.__file__).parent / "app.py", default_timeout=120)
test.session_state["_patience_s"] = 100.0
test.query_params.update({"gpus": "2", "batch": "4", "model": "tiny-llama"})
test.run()
for page in ("model", "plans", "detail", "compare", "measured", "exports"):
    test.switch_page(f"views/{page}.py").run()
    assert not test.exception, (page, test.exception)
print(ui.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a folder with the wheel's content, built from a copy so that the checkout stays clean."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools builds the wheel")
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for part in PARTS:
        found = ROOT / part
        if found.is_dir():
            shutil.copytree(found, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(found, source / part)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(place)], cwd=source, check=True, capture_output=True, timeout=120)
    site = place / "site"
    zipfile.ZipFile(next(place.glob("*.whl"))).extractall(site)
    return site


def environment(site):
    return {**os.environ, "PYTHONPATH": str(site)}


def test_every_file_of_the_packages_is_in_the_wheel(installed):
    """A page, a catalogue or a schema that the project's file forgets is missed only where there is no checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, check=False, capture_output=True, text=True, timeout=60
    )
    if listed.returncode:
        pytest.skip("git does not know this checkout's files")
    files = {name for name in listed.stdout.split("\0") if name}

    assert {name for name in files if not (installed / name).is_file()} == set()


@pytest.mark.nightly
@pytest.mark.slow
def test_every_page_opens_from_the_wheel(installed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", OPEN],
        check=False,
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert Path(done.stdout.strip()).is_relative_to(installed)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_server_starts_from_the_wheel_with_its_settings(installed, tmp_path):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "planner", "ui", "--port", str(port)], cwd=tmp_path, env=environment(installed)
    )
    try:
        wait_for(f"http://127.0.0.1:{port}", process)
        words = descendants(process.pid)[0].cmdline()
        assert "ui.serve" in words
        assert descendants(process.pid)[0].environ()["PYTHONPATH"].startswith(str(installed))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
