"""Just enough of torch.cuda to run the measuring code without a GPU: streams that remember, events that count.

Every operation is appended to `log` with the streams that are current. Time is the number of operations logged so far,
one millisecond each, so that rates are finite and positive.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class Fake:
    """A stand-in for the module `torch` with `count` devices."""

    int32, bfloat16 = "int32", "bfloat16"

    def __init__(self, count: int) -> None:
        self.count = count
        self.log: list[tuple[str, Any]] = []
        self.device = 0
        self.current: dict[int, Any] = {}
        self.cuda = SimpleNamespace(
            Stream=lambda device: SimpleNamespace(
                device=device,
                wait_event=lambda event: self.log.append(("wait", event)),
            ),
            Event=lambda **_: Event(self),
            stream=self._stream,
            device=self._device,
            device_count=lambda: self.count,
            synchronize=lambda *_: self.log.append(("synchronize", _)),
            can_device_access_peer=lambda a, b: a != b,
            mem_get_info=lambda _: (2**20, 2**30),
            _sleep=lambda cycles: self.log.append(("sleep", cycles)),
            CUDAGraph=lambda: Graph(self),
            graph=self._graph,
        )

    @contextmanager
    def _stream(self, stream):
        before, self.device = self.device, stream.device
        had = self.current.get(stream.device)
        self.current[stream.device] = stream
        try:
            yield
        finally:
            self.current[stream.device], self.device = had, before

    @contextmanager
    def _device(self, ordinal):
        before, self.device = self.device, ordinal
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def _graph(self, graph, *, capture_error_mode):
        self.log.append(("capture", capture_error_mode))
        yield
        self.log.append(("captured", graph))

    def empty(self, elements, *, dtype, device=None, pin_memory=False):
        assert (device is None) == pin_memory
        return Tensor(self, elements, device)

    def empty_like(self, other):
        return Tensor(self, other.elements, other.device)

    def randn(self, rows, columns, *, device, dtype):
        return Tensor(self, rows * columns, device)

    def arange(self, elements, *, dtype, device):
        return Tensor(self, elements, device, value=("arange",))

    def mm(self, a, b, *, out):
        assert a.device == b.device == out.device == f"cuda:{self.device}"
        self.log.append(("mm", out.device))

    def equal(self, a, b):
        assert a.device == b.device, "a comparison across devices would copy again"
        return a.value == b.value


class Tensor:
    def __init__(self, torch: Fake, elements: int, device: str | None, value: Any = None) -> None:
        self.torch, self.elements, self.device, self.value = torch, elements, device, value

    def numel(self) -> int:
        return self.elements

    def zero_(self) -> Tensor:
        self.value = 0
        return self

    def mul_(self, by: int) -> Tensor:
        assert -(2**31) <= by < 2**31
        self.value = (*self.value, "mul", by)
        return self

    def add_(self, what: int) -> Tensor:
        assert -(2**31) <= what < 2**31
        self.value = (*self.value, "add", what)
        return self

    def copy_(self, other: Tensor, *, non_blocking: bool = False) -> Tensor:
        self.value = other.value
        self.torch.log.append(("copy", (other.device, self.device, dict(self.torch.current))))
        return self


class Event:
    def __init__(self, torch: Fake) -> None:
        self.torch, self.at, self.stream = torch, 0, None

    def record(self, stream: Any = None) -> None:
        self.torch.log.append(("record", self))
        self.at, self.stream = len(self.torch.log), stream

    def synchronize(self) -> None:
        assert self.at, "waited for an event that was not recorded"

    def elapsed_time(self, end: Event) -> float:
        assert self.at < end.at
        return float(end.at - self.at)


class Graph:
    def __init__(self, torch: Fake) -> None:
        self.torch = torch

    def replay(self) -> None:
        self.torch.log.append(("replay", self))

    def reset(self) -> None:
        self.torch.log.append(("reset", self))
