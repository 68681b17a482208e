"""Compiled code is forgotten where there is some; else its compiler, which takes seconds to import, is left alone."""

import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.gpu import device as compiled_code  # noqa: E402 - torch may be missing


def test_without_compiled_code_there_is_no_compiler_to_reset(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, compiled_code.COMPILER, raising=False)
    monkeypatch.setattr(torch.compiler, "reset", lambda: pytest.fail("this imports the compiler"))

    compiled_code.forget_compiled()


def test_code_and_counts_are_forgotten(monkeypatch) -> None:
    forgotten = []
    counters = torch._dynamo.utils.counters
    monkeypatch.setitem(sys.modules, compiled_code.COMPILER, object())
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append("code"))
    counters["stats"]["unique_graphs"] = 3

    compiled_code.forget_compiled()

    assert forgotten == ["code"]
    assert not counters
