"""Rules of the house that no other tool checks."""

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
WITH_EXTRAS = {ROOT / "planner" / "service", ROOT / "planner" / "remote"}  # need the extra `service`
PACKAGES = ("topology", "simulator", "planner", "executor", "ui")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_ours(package: str) -> None:
    """Distributions of these names exist on the package index; the ones imported must be this repository's."""
    module = __import__(package)

    assert Path(module.__file__).is_relative_to(ROOT)


def test_a_laptop_needs_neither_torch_nor_streamlit() -> None:
    """Importing the three lower packages and their modules loads none of the heavy optional ones."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("topology", "simulator", "planner")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name not in {"__init__.py", "__main__.py"} and WITH_EXTRAS.isdisjoint(path.parents)
    ]
    code = f"""
import importlib, sys
for module in {modules!r}:
    importlib.import_module(module)
heavy = {{"torch", "triton", "streamlit"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_no_file_outgrows_its_idea() -> None:
    """A soft ceiling: a source file beyond 450 lines is probably two ideas."""
    long = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }

    assert {name: lines for name, lines in long.items() if lines > 450} == {}


def test_no_folder_imports_one_that_imports_it() -> None:
    """lint-imports finds circles of modules and of siblings; a folder and its parent are neither."""
    folders = nx.DiGraph()
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    for path in modules.values():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in node.names:
                    found = modules.get(f"{node.module}.{name.name}", modules.get(node.module))
                    if found is not None and found.parent != path.parent:
                        folders.add_edge(str(path.parent.relative_to(ROOT)), str(found.parent.relative_to(ROOT)))

    assert [circle for circle in nx.strongly_connected_components(folders) if len(circle) > 1] == []


def test_nothing_is_unpickled() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()

            assert "import pickle" not in text, path
            assert "shell=True" not in text, path
