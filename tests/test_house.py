"""Rules of the house that no other tool checks."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("topology", "simulator", "planner", "executor", "ui")


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_ours(package: str) -> None:
    """Distributions of these names exist on the package index; the ones imported must be this repository's."""
    module = __import__(package)

    assert Path(module.__file__).is_relative_to(ROOT)


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


SCRIPTS = sorted(path for folder in ("bench", "tools") for path in (ROOT / "tests" / folder).glob("*.py"))


@functools.cache
def names_of(module: str) -> frozenset[str] | None:
    """Return the names that a module of ours defines or imports, its submodules too; None if there is no such
    module.
    """
    place = ROOT.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    found = {one.stem for one in place.iterdir()} if place.is_dir() else set()
    if not path.is_file():
        return frozenset(found) if place.is_dir() else None
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(name.asname or name.name).split(".")[0] for name in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def imported(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield (module, name in it, name here) of all imports of ours, at the top and in functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in (*PACKAGES, "tests"):
            yield from ((node.module, name.name, name.asname or name.name) for name in node.names)


def unknown_names(path: Path) -> Iterator[str]:
    """Yield what a script imports of ours, or takes from a module of ours, that is not there."""
    tree = ast.parse(path.read_text())
    here = {}
    for module, name, as_name in imported(tree):
        here[as_name] = f"{module}.{name}"
        if name not in (names_of(module) or ()):
            yield f"{path.name}: {module}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in here:
            names = names_of(here[node.value.id])
            if names is not None and node.attr not in names:
                yield f"{path.name}: {here[node.value.id]}.{node.attr}"


def test_scripts_name_what_exists() -> None:
    """Scripts are run by hand, on machines of their own: that what they name exists is looked up here."""
    assert [problem for path in SCRIPTS for problem in unknown_names(path)] == []


def test_scripts_tell_how_they_are_called() -> None:
    """What runs as a command reads its arguments with argparse, so that `--help` answers and does nothing else."""
    texts = {path.name: path.read_text() for path in SCRIPTS if path.parent.name == "bench"}
    commands = {name: text for name, text in texts.items() if "__main__" in text}

    assert [
        name for name, text in commands.items() if "ArgumentParser(" not in text and "checks.parser()" not in text
    ] == []
