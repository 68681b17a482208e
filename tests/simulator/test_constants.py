"""Every number of the shipped TOML files says what it is and where it is from: next to it, above it, or at the head of
its file.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SIMULATOR = Path(__file__).parents[2] / "simulator"
FILES = sorted(path for folder in ("runtimes", "kernels", "serving") for path in (SIMULATOR / folder).glob("*.toml"))
NUMBER = re.compile(r"(?P<key>[\w-]+)\s*=\s*[-+]?\d[\d.e+-]*\s*(?P<comment>#.*)?$")


def unexplained(text: str) -> Iterator[str]:
    """Yield the lines that set a number without a comment on the line or above its table or paragraph.

    A key may also be explained in the comment that a file begins with.
    """
    head = text.split("\n\n", 1)[0]
    explained = set(re.findall(r"[\w-]+", head)) if head.startswith("#") and "\n[" not in head else set()
    for paragraph in re.split(r"\n\s*\n", text):
        above = False
        for line in paragraph.splitlines():
            above |= line.startswith("#") or bool(re.match(r"\[.*\]\s*#", line))
            found = NUMBER.match(line)
            if found is None:
                continue
            known = found["key"] in explained or f"{found['key'].split('_')[0]}_" in explained
            if not (above or found["comment"] or known):
                yield line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_is_explained(path: Path) -> None:
    assert list(unexplained(path.read_text())) == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[host]\nlaunch_s = 25e-6\n", ["launch_s = 25e-6"]),
        ("[host]\nlaunch_s = 25e-6  # measured\n", []),
        ("# Measured.\n[host]\nlaunch_s = 25e-6\n", []),
        ("[a]\n# Measured.\nx = 1\n\n[b]\nx = 2\n", ["x = 2"]),
        ("# x   of the peak; measured\n\n[a]\nx = 1.0\n\n[b]\ny = 1.0\n", ["y = 1.0"]),
    ],
)
def test_what_counts_as_explained(text: str, lines: list[str]) -> None:
    assert list(unexplained(text)) == lines
