"""Words that `tests/data/words.toml` rules out are not used."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = tomllib.loads((ROOT / "tests" / "data" / "words.toml").read_text())
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "examples" / "site").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
OURS = [
    path
    for folder in ("topology", "simulator", "planner", "executor", "ui", "tests", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".toml", ".js", ".sh"} and (ROOT / "tests" / "data") not in path.parents
]
PLACES = {"documents": DOCUMENTS, "everywhere": [*DOCUMENTS, *OURS]}


@pytest.mark.parametrize("place", PLACES)
def test_no_word_is_used_that_we_ruled_out(place: str) -> None:
    longest_first = sorted(WORDS[place], key=len, reverse=True)
    pattern = re.compile(rf"\b(?:{'|'.join(longest_first)})\b".replace(" ", r"\s+"), re.IGNORECASE)
    found = []
    for path in {*PLACES[place]}:
        text = path.read_text()
        for match in pattern.finditer(text):
            words = " ".join(match[0].lower().split())
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {words}; write {WORDS[place][words]}")

    assert found == [], "\n".join(sorted(found))


def test_no_marks_of_a_merge_are_left() -> None:
    marks = re.compile(r"^(<{7}|>{7}) ", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in {*PLACES["everywhere"]} if marks.search(path.read_text())] == []
