"""Let malloc keep the memory of lists that the host writes for every reduction.

FSDP2 lists the tiles of the gradients that it packs, up to 13 MB for a layer. By glibc's defaults such a list takes
fresh pages from the system every time: of five runs on two H200 with such lists, four took 5 to 28 % less time with
this, and one, whose steps vary by a tenth, 1 to 6 % more (examples/profiles/hosts.md).
"""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h. Larger requests than the first are mapped by themselves and returned when freed, 32 MiB is the
# most that glibc takes; of the rest, this much is kept at the end of the heap.
M_MMAP_THRESHOLD, MAPPED_BYTES = -3, 2**25
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 2**29


def keep_freed_memory() -> bool:
    """Return whether this process's malloc keeps freed memory from here on; other libraries than glibc do not."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
