"""A link with uploaded files opens the same question where they were never uploaded; damaged ones are refused."""

from __future__ import annotations

import base64
import zlib
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import ROOT, said
from topology.errors import PlannerError
from ui.question import share_link, uploads

TOPO = ROOT / "tests" / "data" / "topo" / "52_stas_h100_8gpu_52c.txt"
ASKED = {"gpu": "h100-sxm", "model": "llama3.2-1b"}


def test_a_link_brings_its_files_to_another_machine(explorer, tmp_path, monkeypatch):
    choice = uploads.store("cluster", TOPO.name, TOPO.read_bytes()).choice
    word = share_link.packed((choice, "llama3-8b"))
    query = parse_qs(urlsplit(share_link.address({"cluster": choice}, (choice,))).query)
    assert query == {"cluster": [choice], "files": [word]}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert uploads.find(choice) is None
    assert "is not here" in said(explorer("plans", cluster=choice, **ASKED))
    test = explorer("plans", cluster=choice, files=word, **ASKED)
    assert "plans" in said(test)
    assert "is not here" not in said(test)
    assert uploads.find(choice).path.read_bytes() == TOPO.read_bytes()


def test_a_question_without_uploads_needs_no_files():
    assert share_link.packed(("dgx-h100", "llama3-8b")) == ""


def test_a_file_that_would_unpack_to_too_much_is_refused():
    bomb = base64.urlsafe_b64encode(zlib.compress(b"[" + b" " * (64 << 20), level=9)).decode()
    for word in (bomb, bomb[: share_link.MOST_CHARACTERS]):
        with pytest.raises(PlannerError, match=r"too long|damaged"):
            share_link.unpack(word)


@pytest.mark.parametrize(
    "files",
    [
        '[{"kind": "cluster", "name": "a.txt", "text": "no machine"}]',
        '[{"kind": "program", "name": "a.py", "text": "print()"}]',
        '{"kind": "cluster"}',
    ],
)
def test_what_is_no_cluster_or_model_is_refused_and_not_kept(files):
    word = base64.urlsafe_b64encode(zlib.compress(files.encode())).decode()

    with pytest.raises(PlannerError):
        share_link.unpack(word)
    assert not uploads.choices("cluster")


@given(st.text(max_size=200))
def test_any_word_is_read_or_refused(word):
    with pytest.raises(PlannerError):
        share_link.unpack(word)
