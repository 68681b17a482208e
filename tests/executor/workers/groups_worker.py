"""The worker, which notes after each run what process groups it has: by torch's account, and by the kernel's."""

import gc
import json
from pathlib import Path

import torch.distributed as dist

from executor import worker

right = worker._run_joined


def run_joined(request, device, deadline, recorder, beat, out):
    right(request, device, deadline, recorder, beat, out)
    groups = list(dist.distributed_c10d._world.pg_map)
    gc.collect()
    sockets = [fd for fd in Path("/proc/self/fd").iterdir() if _target(fd).startswith("socket:")]
    left = {
        "names": sorted({group.group_name for group in groups}),
        "members": sorted(dist.get_process_group_ranks(group) for group in groups),
        "sockets": len(sockets),
    }
    (out / f"groups{dist.get_rank()}.json").write_text(json.dumps(left))


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:  # that of the folder itself
        return ""


worker._run_joined = run_joined
if __name__ == "__main__":
    worker.main()
