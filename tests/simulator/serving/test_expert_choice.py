"""Experts and rows on the ranks that hold them, against draws and what others counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simulator.config.hf_config import load_model
from simulator.config.model import MixtureOfExperts
from simulator.serving.expert_choice import on_fullest_rank, visited_share


def test_balanced_routers_reach_more_experts_than_others() -> None:
    """One token reaches those it chooses, many reach all; between, 16 tokens of 8 in 256 experts of DeepSeek-V3's
    balanced router as many as by hand, and of a router without a bias fewer.
    """
    tokens = np.array([1.0, 16.0, 100_000.0])
    balanced, other = (load_model(name).moe for name in ("deepseek-v3", "qwen3-235b-a22b"))
    assert balanced is not None
    assert other is not None
    assert visited_share(balanced, tokens) == pytest.approx([8 / 256, 1 - (1 - 8 / 256) ** 16, 1.0])
    shares = visited_share(other, tokens)
    assert shares[0] == pytest.approx(8 / 128)
    assert shares[1] < 1 - (1 - 8 / 128) ** 16
    assert shares[2] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("tokens", [4, 64])
def test_all_ranks_wait_for_the_one_with_the_most_experts(tokens: int, ranks: int, groups: int) -> None:
    """Against draws: each token chooses 8 of 256 experts by chance, of all or of half of the groups."""
    moe = grouped(groups)
    counts = drawn(moe, tokens)
    visited, _ = on_fullest_rank(moe, np.array([float(tokens)]), ranks, 256 // ranks)
    found = [(count.reshape(ranks, -1) > 0).sum(1).max() for count in counts]
    assert visited[0] == pytest.approx(np.mean(found), rel=0.06)


def test_the_fullest_rank_has_as_many_rows_as_nvidia_counted() -> None:
    """DeepSeek-R1 on 32 ranks with 4,096 tokens: 1,024 rows a rank, a standard deviation of 492, and 2.56 times as many
    on the fullest; with 32 experts more, each of which is held twice, 1.11 times (TensorRT-LLM's blog04, Table 1).
    """
    moe = grouped(8)
    rows = on_fullest_rank(moe, np.array([4096.0]), 32, 8)[1][0]
    even = on_fullest_rank(moe, np.array([4096.0]), 32, 9)[1][0]
    assert rows == pytest.approx(2.56 * 1024, rel=0.2)
    assert even == pytest.approx(1.11 * 1024, rel=0.1)


def grouped(groups: int) -> MixtureOfExperts:
    """Return DeepSeek-V3's experts in so many groups, of half of which a token chooses."""
    moe = load_model("deepseek-v3").moe
    assert moe is not None
    return replace(moe, groups=groups, groups_per_token=-(-groups // 2))


def drawn(moe: MixtureOfExperts, tokens: int) -> list[np.ndarray]:
    """Return how many tokens chose each expert, in 300 draws."""
    random = np.random.default_rng(tokens)
    scores = random.random((300, tokens, moe.groups, 256 // moe.groups))
    scores[np.argsort(random.random((300, tokens, moe.groups)), axis=2) >= moe.groups_per_token] = -1.0
    chosen = np.argsort(-scores.reshape(300, tokens, 256), axis=2)[:, :, :8].reshape(300, -1)
    return [np.bincount(one, minlength=256) for one in chosen]


def test_experts_of_one_rank_wait_for_no_other() -> None:
    moe = load_model("deepseek-v3").moe
    assert moe is not None
    visited, rows = on_fullest_rank(moe, np.array([16.0]), 1, 256)
    assert visited == pytest.approx(256 * visited_share(moe, np.array([16.0])))
    assert rows == pytest.approx([128.0])
