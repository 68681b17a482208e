"""Files that releases wrote stay readable, and those of a newer schema are refused with what reads them.

`tests/data/schemas/VERSION` has one file of each format as that release wrote it. A release adds a folder of its own;
none is changed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fuzz.formats import FORMATS, wrong_numbers
from topology.errors import UserError

SCHEMAS = Path(__file__).parent / "data" / "schemas"
FILES = sorted(SCHEMAS.glob("*/*.*"))
VERSIONED = [path for path in FILES if '"schema_version"' in path.read_text("utf-8") and path.stem != "case"]


def name(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_of_every_release_are_read(path, tmp_path):
    shown = FORMATS[path.stem.replace("_", " ")].read(path.read_text("utf-8"), tmp_path / path.name)

    assert shown
    assert list(wrong_numbers(shown)) == []


@pytest.mark.parametrize("path", VERSIONED, ids=name)
def test_files_of_a_newer_schema_are_refused_with_what_reads_them(path, tmp_path):
    first, *rest = path.read_text("utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
    text = "\n".join([json.dumps({**json.loads(first), "schema_version": 99}), *rest])

    with pytest.raises(UserError) as refused:
        FORMATS[path.stem.replace("_", " ")].read(text, tmp_path / path.name)

    assert "99" in str(refused.value)
