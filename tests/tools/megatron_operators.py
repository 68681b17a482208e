"""Count what Megatron-Core's router runs, for `runtimes/megatron-lm.toml`.

PYTHONPATH=a checkout of NVIDIA/Megatron-LM: python tests/tools/megatron_operators.py

Prints the ATen operators (without views) of its functions in the forward and backward pass.
"""

from __future__ import annotations

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


if __name__ == "__main__":
    main()
