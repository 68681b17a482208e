"""Every operation in every mode on gloo processes; writes the verdicts of rank 0 as JSON lines to the file named."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from executor.overlap import MODES
from executor.verify.overlap import OPERATIONS, Shape, check

SHAPES = (Shape(rows=24, depth=16, columns=8), Shape(rows=36, depth=8, columns=24, weights=2))


def main(out: str) -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    lines = []
    for operation in OPERATIONS:
        for mode in MODES:
            for seed, shape in enumerate(SHAPES):
                verdict = check(
                    operation, mode, shape, group, device=torch.device("cpu"), dtype=torch.float64, seed=seed
                )
                lines.append(
                    json.dumps(
                        {"what": f"{operation} {mode} {seed}", "difference": verdict.difference, "ok": verdict.ok}
                    )
                )
    if dist.get_rank() == 0:
        Path(out).write_text("\n".join(lines) + "\n")
    dist.destroy_process_group()


main(sys.argv[1])
