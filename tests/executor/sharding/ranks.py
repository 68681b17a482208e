"""Runs modules on ranks of gloo and holds outputs and gradients against the module itself on one process."""

from __future__ import annotations

import copy
import importlib.util
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import msgspec
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from executor.sharding import ShardedFunction, api, capture, shard
from executor.sharding.places import StridedShard
from executor.sharding.run_program import RankProgram
from planner.sharding.answer import answer_request
from planner.sharding.backends.dtensor_file import write_dtensor_file
from planner.sharding.backends.local_copies import lies_in
from planner.sharding.backends.memory_order import order_of
from planner.sharding.plans.report import Limits
from simulator.sharded.program import read_program
from tests.executor.forked_ranks import start
from topology.catalog.cluster_file import load_cluster


@dataclass
class Case:
    name: str
    module: torch.nn.Module
    args: tuple
    mesh: dict
    constraints: dict = field(default_factory=dict)
    kwargs: dict = field(default_factory=dict)
    tolerance: float = 1e-9
    lies: bool = False  # whether pieces are looked at while it runs: they lie in memory as the program says


def planned_here(document, *, cluster=None, memory_limit=None):
    """What the planner's process answers, without starting one for every case."""
    machine = None if cluster is None else load_cluster(cluster)
    limits = Limits(memory_bytes=None if memory_limit is None else memory_limit * 2**30)
    program = answer_request(document, where="the test", cluster=machine, limits=limits).written.program
    return read_program(msgspec.json.decode(msgspec.json.encode(program)), where="the test")


def _on_ranks(work, ranks: int, *args) -> None:
    """Call `work(*args)` on ranks of one gloo group, each a process."""
    start(_join, ranks, work, args)


def _join(work, args):
    dist.init_process_group("gloo")
    try:
        work(*args)
    finally:
        dist.destroy_process_group()


def run(cases: list[Case], ranks: int, *, quick: bool = True) -> None:
    """Every case on `ranks` processes; the first difference to one process is raised."""
    _on_ranks(_worker, ranks, cases, quick)


def _worker(cases, quick):
    if quick:
        api.plan = planned_here
    for case in cases:
        check(case)


def check(case: Case) -> None:
    """Outputs and all gradients of a case are those of one process, in float64."""
    torch.manual_seed(3)
    asked = [one for one in case.args if isinstance(one, torch.Tensor) and one.requires_grad]
    expected = _first(case.module(*case.args, **case.kwargs))
    close = {"rtol": 10 * case.tolerance, "atol": case.tolerance}
    weight = torch.randn(expected.shape, dtype=expected.dtype)
    wanted = {name: one for name, one in case.module.named_parameters() if one.requires_grad}
    leaves = [*wanted.values(), *asked]
    gradients = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)

    sharded = shard(case.module, case.args, case.kwargs, mesh=case.mesh, **case.constraints)
    with hold_orders(case.name) if case.lies else nullcontext():
        _check(case, sharded, expected, weight, wanted, asked, gradients, close)


@contextmanager
def hold_orders(name):
    """Every piece lies in memory in the order that the program says of its buffer."""
    plain, ordered = RankProgram._do, set()

    def do(self, instruction, state):
        plain(self, instruction, state)
        at = state.at
        for one in set(instruction.writes) & set(at):
            said = self.program.buffers[one].order
            assert lies_in(at[one].shape, order_of(tuple(at[one].shape), at[one].stride()), said), f"{name}: {one}"
            ordered.update([one] if said else [])

    RankProgram._do = do
    yield
    RankProgram._do = plain
    assert ordered, name


def _check(case, sharded, expected, weight, wanted, asked, gradients, close):
    if sharded.program.interleaved:
        found = _first(sharded.step(*case.args, gradients=[weight], **case.kwargs))
    else:
        found = _first(sharded(*case.args, **case.kwargs))
        (found.full_tensor() * weight).sum().backward()

    torch.testing.assert_close(found.full_tensor(), expected.detach(), **close, msg=case.name)
    for one, gradient in zip(asked, gradients[len(wanted) :], strict=True):
        torch.testing.assert_close(one.grad, gradient, **close, msg=f"{case.name}: an input")
        one.grad = None
    have = dict(sharded.named_parameters())
    if not sharded.program.stage_axis:
        tensors = {n for n, one in case.module.state_dict().items() if isinstance(one, torch.Tensor)}
        assert set(sharded.state_dict()) == tensors, case.name
        assert set(have) == set(dict(case.module.named_parameters())), case.name
    for name, gradient in zip(wanted, gradients, strict=False):
        if name not in have:
            assert sharded.program.stage_axis, f"{case.name} {name}"  # another stage has it
        elif gradient is None:  # nothing flows back to it
            assert have[name].grad is None, f"{case.name} {name}"
        else:
            check_gradient(have[name], gradient, close, f"{case.name} {name}")
    assert all(one.grad is None for one in have.values() if not one.requires_grad)


def check_gradient(parameter, gradient, close, name):
    """The gradient of a parameter lies as the parameter does, and is this rank's part of the whole one."""
    found = parameter.grad
    if isinstance(found, DTensor):
        assert (found.placements, found.device_mesh) == (parameter.placements, parameter.device_mesh), name
        gradient = distribute_tensor(gradient, found.device_mesh, found.placements, src_data_rank=None).to_local()
        found = found.to_local()
    torch.testing.assert_close(found, gradient, **close, msg=lambda m: f"{name}: {m}")


def _first(outputs):
    """The first of a module's results."""
    return pytree.tree_leaves(outputs)[0]


def run_files(cases: list[Case], ranks: int, folder) -> None:
    """The Python file written for every case, imported and run by torch alone."""
    files = []
    for number, case in enumerate(cases):
        captured = capture(case.module, case.args)
        constraints = dict(case.constraints)
        cluster = constraints.pop("cluster", None)
        answer = answer_request(
            api.request(captured, case.mesh, **constraints), where=case.name, cluster=cluster and load_cluster(cluster)
        )
        text = write_dtensor_file(answer.captured, captured.graph, answer.plan, title=case.name)
        files.append(folder / f"placed_{number}.py")
        files[-1].write_text(text)
    _on_ranks(_file_worker, ranks, cases, files)


def _file_worker(cases, files):
    for case, file in zip(cases, files, strict=True):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        placed = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(placed)
        expected = case.module(*case.args)
        parameters = dict(case.module.named_parameters())
        gradients = torch.autograd.grad(expected.square().sum(), list(parameters.values()))
        mesh = init_device_mesh("cpu", placed.MESH_SHAPE, mesh_dim_names=placed.MESH_NAMES)
        module = placed.parallelize(copy.deepcopy(case.module), mesh)
        # DTensor has no rule for the CPU's flash attention
        with placed.implicit_replication(), sdpa_kernel(SDPBackend.MATH):
            found = module(*placed.placed_inputs(mesh, *case.args))
            assert list(found.placements) == placed.OUTPUTS[0], case.name
            found.square().sum().full_tensor().backward()
        torch.testing.assert_close(found.full_tensor(), expected.detach(), msg=case.name)
        grads = {
            n.replace("parametrizations.", "").replace(".original", ""): p.grad for n, p in module.named_parameters()
        }
        for name, gradient in zip(parameters, gradients, strict=True):
            torch.testing.assert_close(grads[name].full_tensor(), gradient, msg=f"{case.name} {name}")


def inside(dim, blocks):
    """DTensor's placement of devices inside so many blocks of a dim."""
    return StridedShard(dim, split_factor=blocks)


# nvFuser's calls: placements in, placements found for the result (doc/reading/multigpu.md)
CALLS = {
    "tensor parallel": ([Replicate(), Shard(0), Shard(1)], Replicate()),
    "data parallel": ([Shard(0), Replicate(), Replicate()], Shard(0)),
    "devices inside splits of the hidden dim": ([Replicate(), inside(0, 4), inside(1, 4)], Replicate()),
    "devices inside splits of the tokens": ([inside(0, 2), Replicate(), Replicate()], inside(0, 2)),
}


def run_function(ranks: int) -> None:
    _on_ranks(_function_worker, ranks, ranks)


def _function_worker(ranks):
    api.plan = planned_here
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("DIDx",))
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in ((8, 16), (32, 16), (16, 32))]
    mlp = ShardedFunction(feed_forward)
    for name, (placements, expected) in CALLS.items():
        args = [distribute_tensor(w, mesh, [p]).requires_grad_() for w, p in zip(wholes, placements, strict=True)]
        y = mlp(*args)
        assert y.placements == (expected,), name
        y.to_local().square().sum().backward()
        own = [w.clone().requires_grad_() for w in wholes]
        feed_forward(*own).square().sum().backward()
        for found, whole in [
            (y, feed_forward(*wholes)),
            *((a.grad, alone.grad) for a, alone in zip(args, own, strict=True)),
        ]:
            # torch 2.11 cuts a tensor inside blocks, but has no redistribution of one
            own_piece = distribute_tensor(whole.detach(), mesh, found.placements).to_local()
            torch.testing.assert_close(found.to_local(), own_piece, msg=name)


def feed_forward(x, up, down):
    return functional.linear(functional.gelu(functional.linear(x, up)), down)
