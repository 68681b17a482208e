"""The table of faults names tests that exist, one for each fault."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "examples" / "validation" / "faults.md").read_text("utf-8")


def test_every_fault_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| (\d+) \|.*?`(tests/[\w/]+\.py)::(\w+)`", TABLE, re.MULTILINE)

    assert [int(number) for number, *_ in rows] == list(range(1, 66))
    missing = [f"{number}: {file}::{name}" for number, file, name in rows if f"def {name}(" not in _text(file)]
    assert missing == []


def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text("utf-8") if path.is_file() else ""
