"""Write examples/sharding/dtensor.md: operators and redistributions that torch's DTensor refuses or pays much for, and
here.

    python tests/tools/dtensor_table.py [--out FILE]

Four processes of gloo. Every row is run three ways: whole on one process, with DTensors (eager, the installed torch),
and as the compiler's program; both results are compared with the first. Bytes are those a rank sends if collectives are
rings.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from executor.sharding import api, shard
from executor.sharding.places import tokens_of
from planner.sharding.answer import answer_request
from simulator.sharded.program import read_program
from tests.executor.forked_ranks import meet_at, meeting_point
from topology.codec import to_json

FILE = Path(__file__).resolve().parents[2] / "examples" / "sharding" / "dtensor.md"
TWO_BY_TWO = ((2, 2), ("a", "b"))
FOUR = ((4,), ("a",))
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
P = Partial()


@dataclass(frozen=True)
class Row:
    """`function` of tensors of `shapes`, on a mesh, with placements of its operands and, if prescribed, of its
    result.
    """

    what: str
    function: object
    shapes: tuple
    mesh: tuple
    placements: tuple
    result: tuple | None = None
    integers: int = -1  # operand of integers below this number's tensor's last size


ROWS = [
    Row("linear, tokens sharded: `[b, s S, e] @ w`", functional.linear, ((2, 8, 16), (32, 16)), FOUR, ((S1,), (R,)), (S1,)),
    Row("batched product, heads sharded", torch.matmul, ((2, 12, 8, 4), (2, 12, 4, 8)), FOUR, ((S1,), (S1,)), (S1,)),
    Row("view `[b, s S, h] -> [(b s), h]`", lambda x: x.reshape(16, 16) * 2, ((2, 8, 16),), FOUR, ((S1,),)),
    Row("view `[8] -> [2, 4]`, both mesh axes on the dim", lambda x: x.view(2, 4) * 2, ((8,),), TWO_BY_TWO, ((S0, S0),)),
    Row("softmax over a sharded axis", lambda x: x.softmax(-1), ((8, 64),), FOUR, ((S1,),), (S1,)),
    Row("log-softmax over a sharded axis", lambda x: x.log_softmax(-1), ((8, 64),), FOUR, ((S1,),), (S1,)),
    Row("layer norm, hidden sharded", lambda x, w: functional.layer_norm(x, (64,), w), ((8, 64), (64,)), FOUR, ((S1,), (S0,)), (S1,)),
    Row("RMS norm, hidden sharded", lambda x, w: functional.rms_norm(x, (64,), w), ((8, 64), (64,)), FOUR, ((S1,), (S0,)), (S1,)),
    Row("cross-entropy, vocabulary sharded", functional.cross_entropy, ((16, 64), (16,)), FOUR, ((S1,), (R,)), (R,), 1),
    Row("causal attention, heads sharded (CPU flash)", lambda q: functional.scaled_dot_product_attention(q, q * 2, q, is_causal=True), ((2, 8, 16, 4),), FOUR, ((S1,),), (S1,)),
    Row("attention, keys and values sharded", functional.scaled_dot_product_attention, ((1, 4, 16, 8),) * 3, FOUR, ((R,), (S2,), (S2,)), (R,)),
    Row("sum pending on both axes to copies", lambda x: x.clone(), ((64, 64),), TWO_BY_TWO, ((P, P),), (R, R)),
    Row("`(S0, S1) -> (S1, S0)`", lambda x: x.clone(), ((64, 64),), TWO_BY_TWO, ((S0, S1),), (S1, S0)),
    Row("`(S0, S0) -> (R, S0)`", lambda x: x.clone(), ((64, 64),), TWO_BY_TWO, ((S0, S0),), (R, S0)),
]  # fmt: skip


class RingBytes(TorchDispatchMode):
    """Adds up what DTensor's collectives send, each in a group of `ranks`: all axes of a row's mesh have that size."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.calls: list[str] = []
        self.sent = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace.startswith("_c10d_functional") and not name.startswith(("_", "wait")):
            n = self.ranks
            size = args[0].numel() * args[0].element_size()
            share = {"all_gather_into_tensor": n - 1, "all_reduce": 2 * (n - 1) / n}.get(name, (n - 1) / n)
            self.calls.append(name.replace("_into_tensor", "").replace("_tensor", "").replace("_single", ""))
            self.sent += share * size
        return func(*args, **(kwargs or {}))


class Function(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def planned_here(document, *, cluster=None, memory_limit=None):
    assert cluster is None
    assert memory_limit is None
    answer = answer_request(document, where="the table")
    planned_here.plan = answer.plan
    return read_program(json.loads(to_json(answer.written.program)), where="the table")


def operands(row: Row) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(shape) for shape in row.shapes]
    if row.integers >= 0:
        made[row.integers] = torch.randint(0, 64, row.shapes[row.integers])
    return made


def with_dtensors(row: Row, mesh) -> str:
    wholes = operands(row)
    pieces = []
    for whole, placements in zip(wholes, row.placements, strict=True):
        if any(isinstance(p, Partial) for p in placements):
            first = dist.get_rank() == 0
            pieces.append(DTensor.from_local(whole if first else torch.zeros_like(whole), mesh, placements))
        else:
            pieces.append(distribute_tensor(whole, mesh, placements))
    counted = RingBytes(row.mesh[0][0])
    try:
        with counted:
            found = row.function(*pieces)
            if row.result is not None:
                found = found.redistribute(placements=row.result)
        torch.testing.assert_close(found.full_tensor(), row.function(*wholes))
    except AssertionError:
        return "**wrong result**"
    except Exception as error:  # noqa: BLE001 - the table says what torch says
        lines = str(error).strip().splitlines()
        return f"error: {lines[0][:90] if lines else type(error).__name__}"
    return written(counted.calls, counted.sent)


def here(row: Row) -> str:
    wholes = operands(row)
    shape, names = row.mesh
    constraints = {f"args_{i}": tokens_of(p) for i, p in enumerate(row.placements)}
    if row.result is not None:
        constraints["output0"] = tokens_of(row.result)
    api.plan = planned_here
    sharded = shard(
        Function(row.function),
        wholes,
        mesh=dict(zip(names, shape, strict=True)),
        placements=constraints,
        backward=False,
        open_outputs=row.result is None,
        policy="min_ring_bytes" if row.result is not None else None,
    )
    found = sharded(*wholes)
    torch.testing.assert_close(found.full_tensor(), row.function(*wholes))
    plan = None if dist.get_rank() else planned_here.plan
    return "" if plan is None else written([one.kind for one in plan.collectives], float(plan.ring_send_bytes))


def written(calls: list[str], sent: float) -> str:
    if not calls:
        return "nothing sent"
    names = [f"{calls.count(one)} x {one}" if calls.count(one) > 1 else one for one in dict.fromkeys(calls)]
    return f"{', '.join(names)}: {sent:,.0f} B"


def worker(rank: int, port: int, out: str) -> None:
    meet_at(port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    rows = []
    for row in ROWS:
        mesh = init_device_mesh("cpu", row.mesh[0], mesh_dim_names=row.mesh[1])
        rows.append((row.what, with_dtensors(row, mesh), here(row)))
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    out = parser.parse_args().out
    store = meeting_point()
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder, "rows.json")
        mp.spawn(worker, (store.port, str(rows_file)), nprocs=4)
        rows = json.loads(rows_file.read_text())
    lines = [
        "# DTensor's operators compared with the compiler's",
        "",
        f"torch {torch.__version__.split('+')[0]}, four processes of gloo, float32; `python tests/tools/dtensor_table.py` writes this.",
        "Both results are compared with one process. Bytes are what a rank sends if collectives are rings. DTensor runs eagerly, and",
        "its result is redistributed to the placement that the compiler is asked for.",
        "",
        "| what | DTensor | here |",
        "|---|---|---|",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
        "",
    ]
    out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
