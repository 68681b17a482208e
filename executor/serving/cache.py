"""The paged KV cache of one rank, and which pages belong to whom."""

from __future__ import annotations

import torch

from executor.serving.operators import Heads, Pages
from topology.errors import Infeasible

PAGE = 64  # tokens: one page is one block of keys that a program of the attention kernel multiplies


class PagedCache:
    """`pages` pages of PAGE tokens for every layer. Page 0 belongs to no sequence: rows that fill up a batch write
    there.
    """

    def __init__(self, layers: int, pages: int, heads: Heads, *, device: torch.device, dtype: torch.dtype) -> None:
        # Random numbers: sequences whose pages nothing was written to are timed, and equal numbers draw less power.
        self.data = torch.empty((layers, 2, pages, heads.kv, PAGE, heads.width), device=device, dtype=dtype).normal_()
        self.pages = pages
        self._free = list(range(pages - 1, 0, -1))

    def layer(self, index: int) -> Pages:
        """Return keys and values of a layer."""
        return Pages(self.data[index, 0], self.data[index, 1])

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self, tokens: int) -> list[int]:
        """Return pages for so many tokens, which are the caller's until `give_back`. Raises Infeasible without
        enough.
        """
        count = pages_of(tokens)
        if count > len(self._free):
            raise Infeasible(f"{count} pages of the cache are wanted, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


def pages_of(tokens: int) -> int:
    """Return how many pages so many tokens take."""
    return -(-tokens // PAGE)


def page_bytes(layers: int, heads: Heads, dtype: torch.dtype) -> int:
    """Return bytes of one page over all layers of a rank."""
    return 2 * layers * heads.kv * heads.width * PAGE * dtype.itemsize
