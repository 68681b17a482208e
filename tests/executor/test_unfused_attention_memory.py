"""What attention without a fused kernel and experts without a grouped product allocate, against torch."""

from collections.abc import Callable
from typing import Any

import pytest

from simulator.kernels.operators import OperatorSpec
from simulator.runtimes.library import runtime_spec

torch = pytest.importorskip("torch")

from torch._inductor.utils import run_fw_bw_and_get_code  # noqa: E402 - after the skip
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402 - after the skip
from torch.profiler import ProfilerActivity, profile  # noqa: E402 - after the skip

from executor.model.moe import looped  # noqa: E402 - after the skip

BATCH, HEADS, TOKENS, WIDTH = 1, 2, 640, 32


def described(runtime: str, part: str, name: str, *conditions: str) -> OperatorSpec:
    operators = getattr(runtime_spec(runtime).layer, part)
    (found,) = [o for o in operators if o.name == name and set(conditions) <= set(o.when)]
    return found


def in_scores(tensors: tuple[str, ...]) -> float:
    """Return how many tensors of the scores' shape a description names."""
    return sum(float(t.rpartition("*")[0] or 1) if "*" in t else 1.0 for t in tensors)


def allocated(run: Callable[[], Any]) -> dict[str, float]:
    """Return by operator the bytes that are left of what it allocated when it ends, of its own calls only."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    found: dict[str, float] = {}
    for event in profiler.events():
        found[event.name] = found.get(event.name, 0.0) + event.self_cpu_memory_usage
    return found


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the most bytes that are there at once beyond those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    seen = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = most = 0
    for event in sorted(seen, key=lambda e: e.start_ns()):
        level += event.nbytes()
        most = max(most, level)
    return most


def queries() -> list[torch.Tensor]:
    return [torch.randn(BATCH, HEADS, TOKENS, WIDTH, requires_grad=True) for _ in range(3)]


def test_eager_softmax_of_attention_allocates_its_result_and_a_mask() -> None:
    """The causal mask is added in place, and rows of which nothing is seen are cleared in place."""
    found = allocated(lambda: torch.ops.aten._scaled_dot_product_attention_math(*queries(), is_causal=True))
    scores = BATCH * HEADS * TOKENS * TOKENS * 4

    softmax = described("torchtitan", "attention", "math_softmax", "!compiled")

    assert found["aten::bmm"] == pytest.approx(scores, rel=0.2)  # the scores, and the context alongside them
    assert in_scores(softmax.allocates or ()) == pytest.approx(
        (found["aten::_softmax"] + found["aten::isneginf"]) / scores, rel=0.01
    )
    assert not found.get("aten::add_")


@pytest.mark.nightly
def test_compiled_softmax_of_attention_allocates_its_result_and_backward_works_in_place() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(SDPBackend.MATH):
        _, (forward, backward) = run_fw_bw_and_get_code(
            lambda: torch.compile(attention, fullgraph=True)(*queries()).sum()
        )

    def buffers(code: str) -> int:
        made = [line for line in code.splitlines() if "= empty_strided_cpu(" in line]
        return sum(f"{TOKENS}, {TOKENS})" in line and "torch.float32" in line for line in made)

    softmax = described("torchtitan", "attention", "math_softmax", "compiled")

    assert buffers(forward) == 1 + in_scores(softmax.writes)  # of the scores' product, and of the softmax
    assert buffers(backward) == 1 + in_scores(softmax.backward_allocates or ())  # of the gradient of probabilities


def test_experts_run_one_by_one_allocate_their_gradients_alone() -> None:
    """Gradients are those of plain slices, which make a whole tensor of zeros for each; one expert has no tokens."""
    experts, hidden, width = 4, 256, 16
    tokens = torch.randn(512, hidden, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(experts, width, hidden, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([100, 100, 300, 512], dtype=torch.int32)
    each = zip(tokens.tensor_split(ends[:-1].long()), weights, strict=True)
    expected = torch.cat([rows @ weight.T for rows, weight in each])
    wanted = torch.autograd.grad(expected.square().sum(), (tokens, weights))
    out = looped(tokens, weights, ends)

    most = peak_bytes(lambda: out.backward(2 * out.detach()))

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close((tokens.grad, weights.grad), wanted)
    assert most == tokens.nbytes + weights.nbytes + out.nbytes
