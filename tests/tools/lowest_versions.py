"""Print the lowest versions that pyproject.toml allows of the package and some extras, as constraints of pip:

`python tests/tools/lowest_versions.py test service > lowest.txt && pip install -c lowest.txt -e '.[test,service]'`
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[a-z,]+\])?>=([0-9.]+)")


def lowest(extras: list[str]) -> Iterator[str]:
    """Yield `name==version` for every requirement with a lower bound, of the package and of `extras`."""
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    for required in (project["dependencies"], *(project["optional-dependencies"][name] for name in extras)):
        for line in required:
            if found := BOUND.match(line):
                yield "==".join(found.groups())


if __name__ == "__main__":
    sys.stdout.write("\n".join(lowest(sys.argv[1:])) + "\n")
