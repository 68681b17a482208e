"""Launch a compiled Triton kernel repeatedly without inspecting its arguments each time.

Triton's own launch inspects every argument to find the compiled variant, queries the driver for every tensor, and
encodes a descriptor for every operand: 20 to 50 µs of host time, longer than many of these kernels run. Here all
arguments but some addresses are the same in every call, so the variant is looked up once and the others are bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class _Address:
    """Stands for a tensor in a TMA descriptor: only its address is read."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def data_ptr(self) -> int:
        return self.value


class PreparedKernel:
    """A compiled kernel and its arguments, of which those at `changing` take new addresses in every call.

    `programs` is the grid: a number, or up to three. `args` are those of Triton's own launch, including tensors and TMA
    descriptors; later addresses must be aligned like the first ones. Tensors are not kept alive.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int | tuple[int, ...],
        args: Sequence[Any],
        *,
        changing: Sequence[int],
        **options: int,
    ) -> None:
        grid = _three(programs if isinstance(programs, tuple) else (programs,))
        compiled = kernel.warmup(*args, grid=grid, **options)
        compiled[grid]  # loads it
        self._launch = compiled.run
        # The launcher's own arguments: programs, stream, function, its metadata, and no hooks.
        self._head = [*grid, 0, compiled.function, compiled.packed_metadata, None, None, None]
        self._args = [_by_address(arg) for arg in args]
        descriptors = {index: arg for index, arg in enumerate(self._args) if hasattr(arg, "block_shape")}
        self._changing = [(index, descriptors[index].base if index in descriptors else None) for index in changing]

    def __call__(self, stream: int, *addresses: int) -> None:
        self._head[3] = stream
        for (index, base), address in zip(self._changing, addresses, strict=True):
            if base is None:
                self._args[index] = address
            else:
                base.value = address
        self._launch(*self._head, *self._args)

    def over(self, programs: tuple[int, ...], stream: int, *addresses: int) -> None:
        """Launch with `programs` as the grid, which later calls use as well."""
        self._head[:3] = _three(programs)
        self(stream, *addresses)


def _three(programs: tuple[int, ...]) -> tuple[int, ...]:
    return (*programs, 1, 1)[:3]


def _by_address(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return arg.data_ptr()
    if hasattr(arg, "block_shape"):
        arg.base = _Address(arg.base.data_ptr())
    return arg
