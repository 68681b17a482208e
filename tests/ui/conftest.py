"""What the explorer's tests share. Streamlit is imported only by those that run (`tests.ui.needs`)."""

from __future__ import annotations

import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from streamlit.testing.v1 import AppTest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Uploads and kept runs of a test stay in its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(autouse=True)
def own_main(monkeypatch):
    """Streamlit puts a page in the place of `__main__`, which processes spawned by later tests would run again."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.fixture(scope="session")
def quiet_streamlit():
    """Streamlit's own tests look a thousand times a second whether a page is drawn, and at all that is installed for
    every page: on two cores that takes the time of the processes that answer.
    """
    from streamlit.components.v2 import manifest_scanner
    from streamlit.testing.v1 import local_script_runner

    with pytest.MonkeyPatch.context() as patched:
        seldom = SimpleNamespace(time=time.time, sleep=lambda _: time.sleep(0.02))
        patched.setattr(local_script_runner, "time", seldom)
        patched.setattr(manifest_scanner, "scan_component_manifests", cache(manifest_scanner.scan_component_manifests))
        yield


@pytest.fixture
def explorer(quiet_streamlit):
    """Return a function that opens a page of the explorer with query parameters, and waits so long for its answer."""
    from streamlit.testing.v1 import AppTest

    def opened(page: str = "home", patience_s: float = 100.0, **parameters: str) -> AppTest:
        test = AppTest.from_file(ROOT / "ui" / "app.py", default_timeout=120)
        test.session_state["_patience_s"] = patience_s
        asked = {"model": "llama3.2-1b", "gpus": "4", "batch": "8", "seq": "4096", "numbers": "false"}
        test.query_params.update({**asked, **parameters})
        if page != "home":
            test.switch_page(f"views/{page}.py")
        test.run()
        assert [error.message for error in test.exception] == []
        return test

    return opened


def said(test: AppTest) -> str:
    """Return all words of a page."""
    return "\n".join(
        str(element.value)
        for kind in (test.title, test.subheader, test.markdown, test.caption, test.code, test.info)
        for element in kind
    )


def metrics(test: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in test.metric}


def table(test: AppTest, column: str):
    """Return the first table of a page that has such a column."""
    return next(frame.value for frame in (*test.dataframe, *test.table) if column in frame.value)
