"""Memory that is freed and asked for again is the same memory, without another look at the system."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
from executor.launch.garbage_collection import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        [bytearray(13 * 2**20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
fresh = faults()
assert keep_freed_memory()
faults()
print(fresh, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
def test_lists_written_again_take_no_fresh_pages() -> None:
    """Lists of 13 MB, as FSDP2 writes them for a layer of 32 wide experts, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    fresh, kept = map(int, done.stdout.split())

    assert fresh > 1000
    assert kept < 100
