"""What a CUDA stream can be told without a kernel: to copy, to set a word, to wait for a word or for another stream.

The driver's calls, by address and by stream handle: about a microsecond of the host's time each, where the same through
tensors, events and stream contexts costs five to ten. No multiprocessor takes part, so these also run beside kernels
that fill the GPU.

A stream that waits for a word has no limit of its own: `executor.exchange_watch` names a call whose wait does not end,
and ends the process. One rule keeps such waits from closing a circle even where the hardware puts two streams into one
queue: the order of calls on each rank, run strictly one after the other, must lead to an end.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import torch

from topology.errors import PlannerError

_here = threading.local()


class StreamError(PlannerError):
    """The driver refused, or its Python package is missing."""


@cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver  # noqa: PLC0415 - comes with torch's wheels for CUDA
    except ImportError as error:
        raise StreamError("overlap modes need the package cuda-bindings", remedy="pip install cuda-bindings") from error
    return driver


def _done(answer: tuple[Any, ...]) -> None:
    if answer[0]:
        raise StreamError("the driver refused a stream operation", why=str(answer[0]))


def enter(device: torch.device) -> None:
    """Make the device's context this thread's own: autograd's threads come without one, and the driver asks for it."""
    driver = _driver()
    status, ordinal = driver.cuDeviceGet(device.index)
    _done((status,))
    status, context = driver.cuDevicePrimaryCtxRetain(ordinal)
    _done((status,))
    _done(driver.cuCtxSetCurrent(context))
    _here.device = device.index


def current(device: torch.device) -> int:
    """Return the handle of the current stream; the first thing that an exchange asks for on any thread."""
    if getattr(_here, "device", None) != device.index:
        enter(device)
    return torch._C._cuda_getCurrentRawStream(device.index)  # noqa: SLF001 - torch's own fast way, which Triton uses too


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy bytes between addresses of this GPU or its peers."""
    _done(_driver().cuMemcpyAsync(target, source, nbytes, stream))


def write_word(address: int, value: int, stream: int) -> None:
    """Set a 32-bit word, here or on a peer, after all that the stream has copied. Cannot be captured in a graph."""
    _done(_driver().cuStreamWriteValue32(stream, address, value, 0))


def fill_word(address: int, value: int, stream: int) -> None:
    """As `write_word`, by a memset: slower, and can be captured."""
    _done(_driver().cuMemsetD32Async(address, value, 1, stream))


def wait_word(address: int, value: int, stream: int) -> None:
    """Wait until a word of this GPU has reached `value`, in the cyclic order of int32. Cannot be captured."""
    _done(_driver().cuStreamWaitValue32(stream, address, value & 0xFFFFFFFF, 0))  # 0: greater or equal


class Order:
    """Makes one stream, or several, wait for what another has been given so far. Can be captured."""

    def __init__(self, device: torch.device) -> None:
        current(device)
        status, self._event = _driver().cuEventCreate(_driver().CUevent_flags.CU_EVENT_DISABLE_TIMING.value)
        _done((status,))

    def __call__(self, *, first: int, then: int | tuple[int, ...]) -> None:
        driver = _driver()
        _done(driver.cuEventRecord(self._event, first))
        for stream in then if isinstance(then, tuple) else (then,):
            _done(driver.cuStreamWaitEvent(stream, self._event, 0))
