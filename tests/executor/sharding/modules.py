"""Small modules as users write them for one GPU: nothing in them knows of ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class FeedForward(nn.Module):
    def __init__(self, embed=16, hidden=32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(embed, hidden), nn.Linear(hidden, embed)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Feed-forward layers with their residuals, one after another."""

    def __init__(self, layers=2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FeedForward() for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Norm(nn.Module):
    """RMS norm in single operators, as in most model code."""

    def __init__(self, size) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaBlock(nn.Module):
    """A block of a Llama-like decoder: rotary angles, grouped key-value heads, causal attention, gated feed-forward."""

    def __init__(self, embed=16, hidden=32, heads=4, kv_heads=2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, embed // heads
        self.attention_norm, self.ffn_norm = Norm(embed), nn.RMSNorm(embed)
        self.wq = nn.Linear(embed, embed, bias=False)
        self.wk = nn.Linear(embed, kv_heads * self.width, bias=False)
        self.wv = nn.Linear(embed, kv_heads * self.width, bias=False)
        self.wo = nn.Linear(embed, embed, bias=False)
        self.w1, self.w3 = nn.Linear(embed, hidden, bias=False), nn.Linear(embed, hidden, bias=False)
        self.w2 = nn.Linear(hidden, embed, bias=False)

    def forward(self, x):
        batch, seq, _ = x.shape
        y = self.attention_norm(x)
        q = self.wq(y).view(batch, seq, self.heads, self.width).transpose(1, 2)
        k = self.wk(y).view(batch, seq, self.kv_heads, self.width).transpose(1, 2)
        v = self.wv(y).view(batch, seq, self.kv_heads, self.width).transpose(1, 2)
        at = torch.arange(seq)[:, None] / 10 ** torch.arange(self.width // 2).repeat(2)
        q, k = rotated(q, at.cos(), at.sin()), rotated(k, at.cos(), at.sin())
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(mixed.transpose(1, 2).reshape(batch, seq, -1))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Experts(nn.Module):
    """A mixture of experts: the best two of each token by a router, all experts in one product."""

    def __init__(self, embed=16, hidden=8, experts=4) -> None:
        super().__init__()
        self.router = nn.Linear(embed, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, embed, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, embed) / 4)

    def forward(self, x):
        scores = F.softmax(self.router(x), -1)
        best = scores.topk(2, -1).values[..., -1:]
        weights = torch.where(scores >= best, scores, torch.zeros_like(scores))
        hidden = F.silu(torch.einsum("bse,neh->bsnh", x, self.up))
        return torch.einsum("bsnh,nhe,bsn->bse", hidden, self.down, weights)


class VisionTransformer(nn.Module):
    """Patches by a convolution, torch's own encoder layer, a class from the mean of all patches."""

    def __init__(self, embed=16, classes=8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, embed, 4, 4)
        self.place = nn.Parameter(torch.randn(1, 4, embed) / 4)
        self.layer = nn.TransformerEncoderLayer(embed, 4, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(embed, classes)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2) + self.place
        return self.head(self.layer(x).mean(1))


class UNet(nn.Module):
    """A diffusion model's shape: down, a middle with group norms and a skip, up again."""

    def __init__(self, channels=8) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1, self.conv1 = nn.GroupNorm(4, channels), nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, 2 * channels), nn.Conv2d(2 * channels, 2 * channels, 3, padding=1)
        self.time = nn.Linear(4, 2 * channels)
        self.leave = nn.Conv2d(3 * channels, 3, 3, padding=1)

    def forward(self, image, time):
        first = self.enter(image)
        x = self.conv1(F.silu(self.norm1(first)))
        x = x + self.time(time)[:, :, None, None]
        x = x + self.conv2(F.silu(self.norm2(x)))
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.leave(torch.cat([x, first], 1))


class Classifier(nn.Module):
    """An embedding, a product, a loss over the vocabulary."""

    def __init__(self, vocabulary=12, embed=8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, embed)
        self.head = nn.Linear(embed, vocabulary, bias=False)

    def forward(self, ids, targets):
        logits = self.head(F.layer_norm(self.embed(ids), (self.embed.embedding_dim,)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ManyFunctions(nn.Module):
    """Functions that no rule knows, or that need a dim whole, on what a product makes."""

    def __init__(self, embed=16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(embed, embed) / 4)

    def forward(self, x):
        y = x @ self.weight
        sums = y.logsumexp(1) + y.median(1).values + torch.linalg.vector_norm(y, dim=1) + y.amax((0, 1))
        z = torch.where(x > 0, y, 0.5) + y.gather(1, x.argsort(1)) + y.roll(1, 1).flip(1).cumsum(1)
        pooled = F.avg_pool2d(z, 3, 1, 1)  # of [channels, height, width]: the first dim is no batch
        return F.glu(F.pad(pooled, (0, 0, 1, 1)), -1).movedim(0, 1)[1:-1] * sums.mean() + y.std(1).sum()


class ManyResults(nn.Module):
    """Results of other kinds than tensors with a gradient, one of them twice; a weight under two names; complex
    numbers; writes in place.
    """

    def __init__(self, embed=16) -> None:
        super().__init__()
        self.table = nn.Embedding(12, embed)
        self.head = nn.Linear(embed, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x, t):
        y = x @ self.head.weight.T @ self.table.weight
        y[:, 0] += t[:, 0]
        waves = torch.fft.rfft(y, dim=-1)
        made = torch.fft.irfft(waves * torch.polar(waves.real, waves.imag), dim=-1)
        return {
            "made": made,
            "again": made,
            "x": x,
            "first": y.argmax(-1),
            "none": None,
            "loss": F.smooth_l1_loss(y, t),
        }


@torch.library.custom_op("transformers::grouped_mm_fallback", mutates_args=())
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows by the matrix of their group: what transformers computes, and calls, where torch's kernel takes no such
    dtype.
    """
    return torch.stack([x[row] @ weight[int((offs <= row).sum())] for row in range(len(x))])


@grouped_mm.register_fake
def _(x, weight, offs):
    return x.new_empty(len(x), weight.shape[2])


def _grouped_mm_backward(ctx, gradient):
    x, weight, offs = ctx.saved_tensors
    groups = [int((offs <= row).sum()) for row in range(len(x))]
    of_weight = torch.zeros_like(weight)
    for row, group in enumerate(groups):
        of_weight[group] += torch.outer(x[row], gradient[row])
    return torch.stack([gradient[row] @ weight[group].T for row, group in enumerate(groups)]), of_weight, None


grouped_mm.register_autograd(
    _grouped_mm_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class RoutedExperts(nn.Module):
    """Tokens sorted by expert and multiplied by groups, none dropped, as transformers' `grouped_mm` experts."""

    def __init__(self, experts=4, embed=16, hidden=8, chosen=2) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(embed, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, 2 * hidden, embed) / 4)
        self.down = nn.Parameter(torch.randn(experts, embed, hidden) / 4)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        shares, experts = self.gate(tokens).softmax(-1).topk(self.chosen, -1)
        by_expert, order = experts.flatten().sort()
        ends = torch.histc(by_expert.float(), len(self.up), 0, len(self.up) - 1).cumsum(0, dtype=torch.int32)
        gate, up = grouped_mm(tokens[order // self.chosen], self.up.mT, ends).chunk(2, -1)
        made = grouped_mm(F.silu(gate) * up, self.down.mT, ends) * shares.flatten()[order, None]
        return made[order.argsort()].view(len(tokens), self.chosen, -1).sum(1).view(x.shape)
