"""Operators of a profiled step, by shape, from what the profiler writes."""

from executor.measure.traced_operators import traced_operators
from topology.profile.samples import OperatorSample


def op(name: str, begin: float, end: float, sizes: list, strides: list, kind: str = "c10::BFloat16") -> dict:
    arguments = {"Input Dims": sizes, "Input Strides": strides, "Input type": [kind] * len(sizes)}
    return {"ph": "X", "cat": "cpu_op", "name": name, "tid": 1, "ts": begin, "dur": end - begin, "args": arguments}


def launch(number: int, at: float, took: float) -> list[dict]:
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": at, "dur": 1.0}
        | {"args": {"correlation": number}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 7, "ts": at + 50.0, "dur": took}
        | {"args": {"correlation": number, "stream": 7}},
    ]


def rows(found: list[OperatorSample]) -> list[tuple]:
    return [(s.kind, s.direction, s.shape, round(s.seconds * 1e6), s.count) for s in found]


def test_memory_layouts_tell_the_three_products_of_a_layer_apart() -> None:
    """A layer from h 4 to f 6 for t 8 tokens: x W^T, dy W, dy^T x."""
    events = [
        op("aten::mm", 0, 10, [[8, 4], [4, 6]], [[4, 1], [1, 4]]),
        *launch(1, 5, 100.0),
        op("aten::mm", 20, 30, [[8, 6], [6, 4]], [[6, 1], [4, 1]]),
        *launch(2, 25, 200.0),
        op("aten::mm", 40, 50, [[6, 8], [8, 4]], [[1, 6], [4, 1]]),
        *launch(3, 45, 300.0),
    ]

    assert sorted(rows(traced_operators({"traceEvents": events}))) == [
        ("matmul", "dgrad", {"m": 8, "n": 4, "k": 6}, 200, 1),
        ("matmul", "forward", {"m": 8, "n": 6, "k": 4}, 100, 1),
        ("matmul", "wgrad", {"m": 4, "n": 6, "k": 8}, 300, 1),
    ]


def test_calls_of_one_shape_give_their_median_and_several_kernels_of_a_call_add_up() -> None:
    events = []
    for number, took in enumerate((100.0, 300.0, 200.0)):
        at = 100.0 * number
        events += [op("aten::mm", at, at + 10, [[8, 4], [4, 6]], [[4, 1], [1, 4]]), *launch(number, at + 5, took)]
    events += launch(9, 6, 50.0)  # a second kernel of the first call

    (found,) = traced_operators({"traceEvents": events})

    assert (found.count, round(found.seconds * 1e6)) == (3, 200)


def test_the_product_of_whole_tensors_is_left_for_that_of_the_shards_inside_it() -> None:
    events = [
        op("aten::mm", 0, 100, [[16, 4], [4, 6]], [[4, 1], [1, 4]]),
        op("aten::mm", 50, 60, [[8, 4], [4, 6]], [[4, 1], [1, 4]]),
        *launch(1, 55, 100.0),
    ]

    assert [row[2]["m"] for row in rows(traced_operators({"traceEvents": events}))] == [8]


def test_attention_has_its_axes_and_its_direction() -> None:
    q, k = [2, 8, 64, 16], [2, 2, 64, 16]
    events = [
        op("aten::_scaled_dot_product_cudnn_attention", 0, 10, [q, k, k], [[], [], []]),
        *launch(1, 5, 10.0),
        op("aten::_scaled_dot_product_cudnn_attention_backward", 20, 30, [q, q, k, k], [[], [], [], []]),
        *launch(2, 25, 30.0),
    ]

    found = traced_operators({"traceEvents": events})

    assert {(s.direction, round(s.seconds * 1e6)) for s in found} == {("forward", 10), ("backward", 30)}
    assert all(s.shape == {"b": 2, "a": 8, "kv": 2, "s": 64, "S": 64, "d": 16} for s in found)


def test_tokens_of_experts_are_counted_as_shared_out_evenly() -> None:
    events = [
        op("aten::_grouped_mm", 0, 10, [[40, 4], [5, 4, 6], [5]], [[4, 1], [24, 1, 4], [1]]),
        *launch(1, 5, 10.0),
    ]

    (found,) = traced_operators({"traceEvents": events})

    assert (found.shape, found.direction) == ({"m": 8, "n": 6, "k": 4, "batch": 5}, "forward")


def test_without_kernels_or_shapes_there_is_nothing() -> None:
    assert traced_operators({"traceEvents": [op("aten::mm", 0, 10, [[8, 4], [4, 6]], [[4, 1], [1, 4]])]}) == []
    assert (
        traced_operators({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}]}) == []
    )
