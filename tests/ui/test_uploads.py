"""What people upload is bounded, checked before it is kept, and found again by its content."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT
from topology.errors import PlannerError
from ui import panels
from ui.question import uploads

TOPO = (ROOT / "tests" / "data" / "topo" / "47_3x_a6000_one_pair.txt").read_bytes()


def test_the_same_content_is_kept_once():
    first, second = uploads.store("cluster", "a.txt", TOPO), uploads.store("cluster", "a.txt", TOPO)

    assert first == second
    assert uploads.stored("cluster") == (first,)
    assert uploads.find(first.choice) == first
    assert first.path.read_bytes() == TOPO


@pytest.mark.parametrize("name", ["../../etc/passwd", "/abs/olute.txt", "a b;$(rm -rf).txt", "ß" * 300, "..", ""])
def test_a_name_never_leaves_the_folder(name):
    kept = uploads.store("cluster", name, TOPO)

    assert kept.path.parent == uploads.folder()
    assert uploads.find(kept.choice) == kept


def test_a_file_that_is_too_large_is_refused_unread():
    with pytest.raises(PlannerError, match="MiB"):
        uploads.store("cluster", "big.txt", b"x" * (uploads.MAX_BYTES + 1))

    assert uploads.stored("cluster") == ()


def test_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(uploads, "MAX_FILES", 3)
    for number in range(5):
        uploads.store("cluster", f"m{number}.json", f'{{"gpu": "l40s", "gpus_per_node": {number + 1}}}'.encode())

    assert len(uploads.stored("cluster")) == 3


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=2000), name=st.text(max_size=40))
def test_whatever_is_uploaded_is_read_or_refused(content, name):
    for kind in ("cluster", "model"):
        said = ""
        try:
            assert uploads.store(kind, name, content).path.is_file()
        except PlannerError as error:
            said = str(error)
        assert str(uploads.folder()) not in said


@pytest.mark.parametrize("text", ["![x](http://evil/i.png)", "<script>", ":red[x]", "[a](b)", "`code`", "$x$", "**b**"])
def test_words_of_files_are_shown_as_they_are(text):
    """Markdown of a file name must neither load a picture nor make a link."""
    shown = panels.plain(text)

    assert shown.replace("\\", "") == text
    assert all(shown[i - 1] == "\\" for i, letter in enumerate(shown) if letter in "[]<>()`*$!:" and letter != "\\")
