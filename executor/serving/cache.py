"""The paged KV cache of one rank, and the pages of each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from executor.serving.operators import Heads, Pages
from topology.errors import Infeasible

PAGE = 64  # tokens per page: one page is one block of keys of the attention kernel


@dataclass(slots=True)
class CacheSlot:
    """Where the state of a sequence is on the device."""

    slot: int
    pages: list[int]


class PagedCache:
    """`pages` pages of PAGE tokens for every layer. Page 0 belongs to no sequence: padding rows of a batch
    write there.
    """

    def __init__(self, layers: int, pages: int, heads: Heads, *, device: torch.device, dtype: torch.dtype) -> None:
        # Random numbers: sequences are also timed without writing their pages, and equal numbers draw less power.
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
        """Return pages for this number of tokens, owned by the caller until `give_back`. Raises Infeasible if there are
        too few.
        """
        count = pages_of(tokens)
        if count > len(self._free):
            raise Infeasible(f"{count} pages of the cache are wanted, {len(self._free)} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))


def pages_of(tokens: int) -> int:
    """Return the number of pages for this number of tokens."""
    return -(-tokens // PAGE)


def page_bytes(layers: int, heads: Heads, dtype: torch.dtype) -> int:
    """Return the bytes of one page, over all layers of a rank."""
    return 2 * layers * heads.kv * heads.width * PAGE * dtype.itemsize
