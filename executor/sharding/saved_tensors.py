"""The tensors that autograd saves of one kernel, and their replacement when a buffer is dropped and recomputed.

Saved tensors in a dropped buffer are freed, and looked up in the new one when the backward pass needs them. A new
buffer has the strides of the old one, since the same instruction makes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class Operand(torch.autograd.Function):
    """A value enters a graph that holds no reference to it; its gradient leaves the graph here."""

    @staticmethod
    def forward(ctx: Any, entry: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:  # noqa: ARG004 - gradients are taken before they get here
        return None, None


@dataclass(slots=True)
class _Saved:
    """A tensor that autograd saved, or its sizes, strides and offset in a buffer that was dropped."""

    value: torch.Tensor | None
    buffer: str = ""
    where: tuple[tuple[int, ...], tuple[int, ...], int] = ((), (), 0)


@dataclass(slots=True)
class SavedTensors:
    """The saved tensors of one kernel; `dropped` has the operands that are recomputed, and None for its own result."""

    dropped: dict[str, torch.Tensor | None]
    _saved: list[_Saved] = field(default_factory=list)
    _again: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, value: torch.Tensor) -> _Saved:
        self._saved.append(_Saved(value.detach()))
        return self._saved[-1]

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.value is not None:
            return saved.value
        sizes, strides, offset = saved.where
        buffer = self._again[saved.buffer]
        return buffer.as_strided(sizes, strides, buffer.storage_offset() + offset)

    def release(self, name: str, result: torch.Tensor) -> None:
        """Free saved tensors in buffers that are dropped; `result` is the kernel's, of the buffer called `name`."""
        buffers = {key: result if value is None and key == name else value for key, value in self.dropped.items()}
        for saved in self._saved:
            value = saved.value
            for key, buffer in buffers.items():
                if value is None or buffer is None or _storage(value) != _storage(buffer):
                    continue
                offset = int(value.storage_offset() - buffer.storage_offset())
                saved.value, saved.buffer = None, key
                saved.where = (tuple(value.shape), tuple(value.stride()), offset)
                break
        self.dropped = {}

    def restore(self, again: Mapping[str, torch.Tensor]) -> None:
        """Use the buffers that were recomputed."""
        self._again = again


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
