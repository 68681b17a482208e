"""Times of the matmuls and attention calls of a profiled step, by shape.

The profiler records every operator with the sizes and strides of its inputs, and every kernel with the call that
launched it. An operator's time is that of the kernels launched while it ran on its host thread. The memory layout
identifies the three matmuls of a linear layer, as in `executor.calibrate.kernels`:
    forward  x (m, k) by a weight stored (n, k), which is read transposed
    dgrad    a gradient (m, k) by a weight stored (k, n)
    wgrad    a gradient stored (k, n), read transposed, by x stored (k, m)
Other work of the step runs concurrently, so the samples' regime is `step`. No torch: a trace document in, samples out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from executor.launch.records import median_and_spread
from topology.profile.samples import OperatorSample

DTYPES = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64"}
ATTENTION = (
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
)
BACKWARD = "_backward"
MOST_CALLS = 200_000  # events; a document with more contains more than one step

Key = tuple[str, tuple[tuple[str, int], ...], str, str]  # kind, shape, dtype, direction


def traced_operators(document: Mapping[str, Any]) -> list[OperatorSample]:
    """Return samples of the operators of one profiled step.

    Empty where the profiler recorded no shapes, and on a CPU, where no kernels are launched.
    """
    events = [e for e in document.get("traceEvents", ()) if isinstance(e, dict) and e.get("ph") == "X"]
    if len(events) > MOST_CALLS:
        return []
    launched = _launched(events)
    found: dict[Key, list[float]] = {}
    for event, key in _innermost(events):
        seconds = sum(_within(launched.get(event.get("tid"), ((), ())), event["ts"], event["ts"] + event["dur"]))
        if seconds > 0:
            found.setdefault(key, []).append(seconds)
    return [_sample(key, times) for key, times in sorted(found.items())]


def _innermost(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Key]]:
    """Yield the sampled calls that contain no other sampled call: a DTensor's matmul contains that of its shards."""
    calls = [(e, key) for e in events if e.get("cat") == "cpu_op" and (key := _key(e)) is not None]
    calls.sort(key=lambda call: (str(call[0].get("tid")), call[0]["ts"], -call[0]["dur"]))
    for place, (event, key) in enumerate(calls):
        after = calls[place + 1][0] if place + 1 < len(calls) else None
        ends = event["ts"] + event["dur"]
        if after is None or after.get("tid") != event.get("tid") or after["ts"] >= ends:
            yield event, key


def _launched(events: Sequence[Mapping[str, Any]]) -> dict[Any, tuple[list[float], list[float]]]:
    """Return, by host thread, the launch times of kernels (microseconds) and their durations (seconds)."""
    took: dict[int, float] = {}
    for event in events:
        if event.get("cat") == "kernel" and (number := _argument(event, "correlation")) is not None:
            took[number] = took.get(number, 0.0) + event["dur"] * 1e-6
    by_thread: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in {"cuda_runtime", "cuda_driver"}:
            number = _argument(event, "correlation")
            if number in took:
                by_thread.setdefault(event.get("tid"), []).append((event["ts"], took[number]))
    sorted_calls = {thread: sorted(calls) for thread, calls in by_thread.items()}
    return {thread: ([at for at, _ in calls], [s for _, s in calls]) for thread, calls in sorted_calls.items()}


def _within(calls: tuple[Sequence[float], Sequence[float]], begin: float, end: float) -> Iterator[float]:
    at, seconds = calls
    yield from seconds[bisect_left(at, begin) : bisect_right(at, end)]


def _argument(event: Mapping[str, Any], name: str) -> Any:
    arguments = event.get("args")
    return arguments.get(name) if isinstance(arguments, dict) else None


def _key(event: Mapping[str, Any]) -> Key | None:
    """Return the (kind, shape, dtype, direction) of a call, or None for calls that are not sampled."""
    name = str(event.get("name"))
    sizes, types = _argument(event, "Input Dims"), _argument(event, "Input type")
    strides = _argument(event, "Input Strides")
    if not sizes or not types or str(types[0]) not in DTYPES:
        return None
    dtype = DTYPES[str(types[0])]
    if name == "aten::mm" and strides:
        shape, direction = _product(sizes[0], sizes[1], strides[0], strides[1])
        return "matmul", tuple(sorted(shape.items())), dtype, direction
    if name == "aten::_grouped_mm" and strides:
        grouped = _grouped(sizes, strides)
        return None if grouped is None else ("matmul", tuple(sorted(grouped[0].items())), dtype, grouped[1])
    base = name.removesuffix(BACKWARD)
    if base in ATTENTION:
        backward = name != base
        q, k = sizes[int(backward)], sizes[1 + int(backward)]
        if len(q) != 4 or len(k) != 4:
            return None
        shape = {"b": q[0], "a": q[1], "kv": k[1], "s": q[2], "S": k[2], "d": q[3]}
        return "attention", tuple(sorted(shape.items())), dtype, "backward" if backward else "forward"
    return None


def _product(
    left: Sequence[int], right: Sequence[int], left_strides: Sequence[int], right_strides: Sequence[int]
) -> tuple[dict[str, int], str]:
    """Return the axes and direction of `left` (rows, k) by `right` (k, columns)."""
    rows, k, columns = left[0], left[1], right[1]
    if _transposed(left, left_strides):
        return {"m": columns, "n": rows, "k": k}, "wgrad"
    direction = "forward" if _transposed(right, right_strides) else "dgrad"
    return {"m": rows, "n": columns, "k": k}, direction


def _grouped(sizes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]) -> tuple[dict[str, int], str] | None:
    """Return the same for grouped matmuls of experts, with tokens spread evenly over the experts."""
    left, right = sizes[0], sizes[1]
    if len(left) == 2 and len(right) == 3:  # tokens (T, k) by weights (E, k, n)
        experts = right[0]
        shape, direction = _product(left, right[1:], strides[0], strides[1][1:])
        shape["m"] = round(shape["m"] / experts)
    elif len(left) == 2 and len(right) == 2 and len(sizes) > 2 and sizes[2]:  # gradients of the weights of E experts
        experts = sizes[2][0]
        shape, direction = {"m": right[1], "n": left[0], "k": round(left[1] / experts)}, "wgrad"
    else:
        return None
    return (None if min(shape.values()) < 1 else ({**shape, "batch": experts}, direction)) if experts else None


def _transposed(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    return len(strides) == 2 and strides[0] == 1 and sizes[0] > 1 and strides[1] >= sizes[0]


def _sample(key: Key, times: list[float]) -> OperatorSample:
    kind, shape, dtype, direction = key
    seconds, spread = median_and_spread(times)
    return OperatorSample(
        kind=kind,
        name=kind,
        shape=dict(shape),
        dtype=dtype,
        direction=direction,
        seconds=seconds,
        spread=spread,
        count=len(times),
        regime="step",
    )
