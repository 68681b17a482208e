"""Where an image keeps no bytecode, it is compiled once, ahead of the first rank, by other processors."""

import os
from pathlib import Path

import pytest

from executor.launch import bytecode
from executor.launch.bytecode import BYTECODE, NO_BYTECODE, compile_ahead, keep_bytecode


@pytest.fixture
def bare(tmp_path, monkeypatch) -> dict[str, str]:
    """The environment of an image without bytecode, whose only package is a small one."""
    package = tmp_path / "site" / "small"
    for name in ("__init__.py", "one.py", "tests/__init__.py"):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bytecode, "IMPORTED", ("small", "not_installed"))
    monkeypatch.setattr(bytecode, "_compiled", lambda _: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    environment = {**os.environ, NO_BYTECODE: "1"}
    environment.pop(BYTECODE, None)
    keep_bytecode(environment)
    return environment


def test_sources_are_compiled_where_bytecode_is_to_be_kept(bare) -> None:
    process = compile_ahead(bare)

    assert process is not None
    assert process.wait(60) == 0
    kept = {path.name.partition(".")[0] for path in Path(bare[BYTECODE]).rglob("*.pyc") if "small" in path.parts}
    assert kept == {"__init__", "one"}, "tests are not imported"
    assert compile_ahead(bare) is None, "once is enough"


def test_whoever_keeps_bytecode_elsewhere_or_has_few_processors_compiles_none(bare, monkeypatch) -> None:
    assert compile_ahead({**bare, BYTECODE: "/own"}) is None
    assert compile_ahead({name: value for name, value in bare.items() if name != BYTECODE}) is None
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert compile_ahead(bare) is None
