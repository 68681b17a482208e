"""Launches of the server's kernels: each variant is prepared once, and every call says its own programs and
addresses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from executor.serving import operators  # noqa: E402 - after the check for torch


class Recorded:
    """In the place of `PreparedKernel`."""

    made: ClassVar[list[tuple[Any, ...]]] = []
    launched: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, kernel: Any, programs: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
        self.made.append((kernel, args, options))

    def over(self, programs: tuple[int, ...], stream: int, *addresses: int) -> None:
        self.launched.append((programs, stream, *addresses))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    Recorded.made, Recorded.launched = [], []
    monkeypatch.setattr(operators, "PreparedKernel", Recorded)
    monkeypatch.setattr(operators, "_prepared", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return Recorded


def test_a_variant_is_prepared_once_and_launched_over_the_programs_of_each_call(recorded: type[Recorded]) -> None:
    few, many = torch.zeros(2, 8), torch.zeros(9, 8)

    for x in (few, many, few):
        operators._launch("norm", (x.shape[0],), (x,), (8, 1e-5), num_warps=4)

    assert len(recorded.made) == 1
    assert recorded.made[0][2] == {"changing": range(1), "num_warps": 4}
    assert recorded.launched == [((x.shape[0],), 7, x.data_ptr()) for x in (few, many, few)]


def test_what_triton_compiles_apart_is_prepared_apart(recorded: type[Recorded]) -> None:
    """Types, constants and the alignment of addresses decide what is compiled."""
    x = torch.zeros(64)
    cases = [(x, (1,)), (x, (2,)), (x.to(torch.bfloat16), (1,)), (x[1:], (1,))]

    for tensor, constants in cases:
        operators._launch("kernel", (1,), (tensor,), constants)

    assert len(recorded.made) == len(cases)


def test_a_prepared_kernel_is_launched_with_the_grid_stream_and_addresses_of_the_call() -> None:
    from executor.kernels.prepared_kernel import PreparedKernel

    seen: list[tuple[Any, ...]] = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def __getitem__(self, grid: tuple[int, ...]) -> None: ...

        def run(self, *args: Any) -> None:
            seen.append(args)

    x = torch.zeros(4)
    kernel = SimpleNamespace(warmup=lambda *args, grid, **options: Compiled())
    ready = PreparedKernel(kernel, (3, 2), (x, 5), changing=(0,))
    ready(11, 100)
    ready.over((4,), 12, 200)

    assert [(*call[:4], *call[-2:]) for call in seen] == [(3, 2, 1, 11, 100, 5), (4, 1, 1, 12, 200, 5)]
