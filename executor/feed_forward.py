"""The dense feed-forward layer, which is also the expert that every token of a sparse layer visits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from executor.attention import Close, Project, each, one


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202). `project` and `close` are what overlapped tensor parallelism replaces."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)
        self.w3 = nn.Linear(hidden, width, bias=False)
        self.project: Project = each
        self.close: Close = one

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.project(x, (self.w1, self.w3))
        return self.close(functional.silu(gate) * up, self.w2)
