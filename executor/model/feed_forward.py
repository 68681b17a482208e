"""The dense feed-forward layer, also used as the shared expert of a sparse layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from executor.model.attention import InputProjection, OutputProjection, apply_linear, project_each


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202). Tensor parallelism replaces `project_in` and `project_out`."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)
        self.project_in: InputProjection = project_each
        self.project_out: OutputProjection = apply_linear

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project_in(x, (self.w1, self.w3))
        return self.project_out(functional.silu(gate) * up, self.w2)
