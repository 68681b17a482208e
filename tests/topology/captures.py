"""Paths of the public captures under tests/data, and the answer keys beside them."""

import json
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"
TOPO = DATA / "topo"
NCCL = DATA / "nccl_xml"
MATRICES = json.loads((TOPO / "index.json").read_text())["matrices"]
NCCL_FILES = json.loads((NCCL / "index.json").read_text())["files"]


def text(path: str) -> str:
    return (DATA / path).read_text(encoding="utf-8")


def matrix(prefix: str) -> str:
    """The capture whose file name begins with `prefix`, such as `64_`."""
    (path,) = TOPO.glob(f"{prefix}*.txt")
    return path.read_text(encoding="utf-8")
