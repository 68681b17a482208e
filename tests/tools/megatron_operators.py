"""Count what Megatron-Core's router issues, and what each expert adds to the host's time (`runtimes/megatron-lm.toml`).

PYTHONPATH=a checkout of NVIDIA/Megatron-LM: python tests/tools/megatron_operators.py

Prints the ATen operators (without views) of its functions in the forward and backward pass, and the seconds of a loop
over experts as TransformerEngine's GroupedLinear runs it around its products (pytorch/module/grouped_linear.py), with
the hook that Megatron's DDP has on every weight, over those of an operator.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS, EXPERTS, CHOSEN = 64, 16, 4
VIEWS = {"view", "_unsafe_view", "expand", "t", "transpose", "slice", "select", "unsqueeze", "detach", "alias", "empty"}


class Counter(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.__name__.split(".")[0]) not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def show(name: str, function: Callable[[], torch.Tensor]) -> None:
    with Counter() as forward:
        result = function()
    given = torch.ones_like(result)
    with Counter() as backward:
        result.backward(given)
    print(
        f"{name}: {len(forward.names)} forward, {len(backward.names)} backward\n  {forward.names}\n  {backward.names}"
    )


def balance(logits: torch.Tensor, score: str) -> torch.Tensor:
    """The loss for balance of router.py: _apply_aux_loss, with the value that moe_logging.py adds up."""
    chosen, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, CHOSEN, score)
    counts = chosen.sum(dim=0)
    loss = moe_utils.switch_load_balancing_loss_func(scores, counts, TOKENS, CHOSEN, EXPERTS, 0.01)
    (loss / 0.01).detach().add_(1.0)
    return moe_utils.MoEAuxLossAutoScaler.apply(logits, loss)


class Grouped(torch.autograd.Function):
    """What GroupedLinear does for each expert besides its product."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, splits: list[int], *weights: Any) -> torch.Tensor:
        parts = [part if part.dtype == tokens.dtype else part.to(tokens.dtype) for part in torch.split(tokens, splits)]
        cast = [weight if weight.dtype == tokens.dtype else weight.to(tokens.dtype) for weight in weights]
        ctx.save_for_backward(*parts, *cast, *weights)
        ctx.splits, ctx.sums = splits, [weight.main_grad for weight in weights]
        return torch.empty_like(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        weights = ctx.saved_tensors[2 * len(ctx.splits) :]
        torch.split(gradient, ctx.splits)
        given = []
        for weight in weights:
            weight.grad_added_to_main_grad = True
            given.append(torch.empty(weight.main_grad.shape, dtype=weight.dtype))
        return (torch.empty_like(gradient), None, *given)


def seconds(step: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Return the medians of the forward and backward pass of `step`."""
    both = []
    for _ in range(300):
        begin = time.perf_counter()
        result = step()
        middle = time.perf_counter()
        result.backward(torch.ones_like(result))
        both.append((middle - begin, time.perf_counter() - middle))
    return statistics.median(f for f, _ in both), statistics.median(b for _, b in both)


def experts_step(experts: int) -> Callable[[], torch.Tensor]:
    weights, keep = [torch.nn.Parameter(torch.zeros(8)) for _ in range(experts)], []
    for weight in weights:
        weight.main_grad = torch.zeros(8)  # type: ignore[attr-defined]

        def hook(*_: Any, weight: Any = weight) -> None:  # distributed_data_parallel.py: _make_backward_post_hook
            if weight.grad is not None and not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad.data)
            weight.grad = None

        keep.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
        keep[-1].register_hook(hook)
    tokens = torch.zeros(experts, 8, requires_grad=True)
    return lambda: (Grouped.apply(tokens, [1] * experts, *weights), keep)[0]  # type: ignore[no-untyped-call]


def operators_step(operators: int) -> Callable[[], torch.Tensor]:
    first = torch.zeros(8, requires_grad=True)

    def step() -> torch.Tensor:
        result = first
        for _ in range(operators):
            result = result * 1.5
        return result

    return step


def per_item(of: Callable[[int], Callable[[], torch.Tensor]]) -> list[float]:
    return [(many - one) / 32 for one, many in zip(seconds(of(1)), seconds(of(33)), strict=True)]


def main() -> None:
    torch.set_num_threads(1)
    for dtype in (torch.bfloat16, torch.float32):
        for score in ("softmax", "sigmoid"):
            logits = torch.randn(TOKENS, EXPERTS, dtype=dtype, requires_grad=True)
            biased = {"expert_bias": torch.zeros(EXPERTS), "scaling_factor": 2.5} if score == "sigmoid" else {}

            def route(logits: Any = logits, score: str = score, biased: Any = biased) -> torch.Tensor:
                return moe_utils.topk_routing_with_score_function(logits, CHOSEN, score_function=score, **biased)[0]

            show(f"top_k {score} {dtype}", route)
            show(f"balance_loss {score} {dtype}", lambda logits=logits, score=score: balance(logits, score))
    forward, backward = per_item(operators_step)
    ahead, back = per_item(experts_step)
    print(
        f"operator {1e6 * forward:.1f} and {1e6 * backward:.1f} us, an expert's {ahead / forward:.2f}, {back / backward:.2f} of it"
    )


if __name__ == "__main__":
    main()
