"""`shard`: a module as for one GPU, run on many. Every rank calls it with the same arguments, as it would make a mesh.

    model = shard(module, (x,), mesh={"data": 2, "model": 4},
                  axes={"x": "batch seq embed", "*.q_proj.weight": "heads embed"},
                  parameters={"heads": "model"}, compute={"batch": "data", "heads": "model"})
    y = model(x)
    y.sum().backward()

The module is captured, rank 0 asks the planner (as a process of its own) for placements and a program, and every rank
keeps its pieces of the parameters. Inputs are whole tensors that all ranks have, or DTensors in the placements that the
plan has; outputs are DTensors. A call must have the captured dtypes and flags. Its sizes may differ: each set of sizes
has a program, made at its first call, and the programs of the last `MOST_SIZES` are kept. `exported.py` lists what else
of a module is kept, and what is refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree

from executor.launch.local_ranks import child_environment
from executor.sharding.call import (
    Piece,
    Run,
    ambient_autocast,
    check_call,
    is_shaped,
    micro_batches_of,
    of_one_batch,
    signature_of,
)
from executor.sharding.capture import Captured, Output, capture
from executor.sharding.exported import skeleton
from executor.sharding.places import placements_of, tokens_of
from executor.sharding.run_program import RankProgram, State, place_in
from executor.sharding.weights import Weights, as_dtensor
from simulator.sharded.graph import BUFFER, CONSTANT, INPUT, PARAMETER
from simulator.sharded.program import RunnableProgram, read_program
from topology.codec import JsonObject
from topology.errors import BadInput, PlannerError, UserError

PLANNER_BUDGET_S = 600.0
MOST_SIZES = 32  # other sets of argument sizes whose programs a sharded module keeps
AxisMap = Mapping[str, str | Sequence[str]]


def request(
    captured: Captured,
    mesh: Mapping[str, int],
    *,
    placements: Mapping[str, Sequence[str]] | None = None,
    axes: Mapping[str, str] | None = None,
    parameters: AxisMap | None = None,
    compute: AxisMap | None = None,
    choose: Sequence[str] = (),
    policy: str | None = None,
    domains: Mapping[str, str] | None = None,
    open_outputs: bool = False,
    backward: bool = True,
    gradients: Sequence[str] = (),
    chunks: Mapping[str, int | str] | None = None,
    stages: Mapping[str, Any] | None = None,
    routes: str | None = None,
) -> JsonObject:
    """Return the document that `planner shard` reads: the graph, and the constraints on its sharding."""
    return {
        "graph": msgspec.to_builtins(captured.graph),
        "mesh": {"names": list(mesh), "shape": list(mesh.values())},
        "placements": {name: list(tokens) for name, tokens in (placements or {}).items()},
        "axes": dict(axes or {}),
        "parameters": dict(parameters or {}),
        "compute": dict(compute or {}),
        "choose": list(choose),
        "policy": policy,
        "domains": dict(domains or {}),
        "open_outputs": open_outputs,
        "backward": backward,
        "gradients": list(gradients),
        **({} if chunks is None else {"chunks": dict(chunks)}),
        **{name: one for name, one in (("stages", stages), ("routes", routes)) if one is not None},
    }


def plan(
    document: Mapping[str, Any],
    *,
    cluster: str | None = None,
    memory_limit: float | None = None,
    budget_s: float = PLANNER_BUDGET_S,
) -> RunnableProgram:
    """Ask `planner shard` for the program of a request, the fastest on `cluster` within `memory_limit` (GiB per rank).

    Raises UserError if there is none.
    """
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "program.json")
        asked.write_text(json.dumps(document), encoding="utf-8")
        command = [sys.executable, "-m", "planner", "shard", str(asked), "--program", str(answered), "--json"]
        command += [] if cluster is None else ["--cluster", cluster]
        command += [] if memory_limit is None else ["--memory-limit", repr(memory_limit)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=budget_s,
                check=False,
                env=child_environment(None, run_id="shard"),
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"the planner found no program in {budget_s:.0f} s", remedy="fewer open placements"
            ) from error
        if not answered.exists():
            rows = msgspec.json.decode(done.stdout)["cases"] if done.stdout.startswith("{") else []
            why = rows[0]["rejected"] if rows else done.stderr.strip()[-500:]
            raise UserError("the planner has no program for this", why=why)
        return read_program(msgspec.json.decode(answered.read_bytes()), where="the planner's program")


def shard(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | Mapping[str, int],
    cluster: str | None = None,
    memory_limit: float | None = None,
    dynamic: bool = True,
    **constraints: Any,
) -> ShardedModule:
    """Return `module` on the ranks of `mesh`, for calls with the shapes of `args` and `kwargs`.

    `constraints` are those of `request`: `placements` by tensor (`["S(0)", "R"]`, one a mesh axis), or `axes` with the
    maps `parameters` and `compute`. With `cluster` (a name or a file, as the planner's commands take it) what is left
    open is chosen by time there, else by bytes; `policy="min_time"` leaves all open but placements. What does not fit
    `memory_limit` (GiB of a rank, for parameters with their state and all that a step needs) is dropped and made again
    in the backward pass: gathered, or computed. DTensors among `args` say their own placements. With `stages`
    (`{"axis": "pp", "of": {"layers.1": 1}, "micro_batches": 4}`) modules run on coordinates of a mesh axis, and the
    first dim of every argument is cut into micro batches; results are handed from their stage to all ranks. Arguments
    that require gradients have them. With `dynamic`, calls may have other sizes of arguments. Collective: every rank
    calls it, and at the first call of other sizes. Raises UserError where the module cannot be captured or the planner
    has no program.
    """
    again = skeleton(module) if dynamic else None
    captured = _captured(module, args, kwargs or {}, int((constraints.get("stages") or {}).get("micro_batches", 1)))
    if captured.written and constraints.get("stages"):
        raise UserError(
            f"{type(module).__name__} writes into its buffer {next(iter(captured.written))}",
            why="with pipeline stages, each micro batch would write into it",
            remedy="call module.eval(), as for running statistics of batch norms",
        )
    sizes = _mesh_sizes(mesh)
    given = dict(constraints.pop("placements", None) or {})
    names = [one.name for one in captured.graph.inputs if one.kind == INPUT]
    tensors = [leaf for leaf in pytree.tree_leaves((list(args), dict(kwargs or {}))) if isinstance(leaf, torch.Tensor)]
    asked = []
    for name, leaf in zip(names, tensors, strict=True):
        if isinstance(leaf, DTensor):
            given.setdefault(name, tokens_of(leaf.placements))
        asked += [name] if leaf.requires_grad else []
    constraints["gradients"] = [*constraints.get("gradients", ()), *asked]
    question = _Question(again, sizes, {**constraints, "placements": given}, cluster, memory_limit)
    program = question.program(captured)
    made = ShardedModule(
        module, captured, program, mesh if isinstance(mesh, DeviceMesh) else None, constraints["gradients"]
    )
    made.question = question if again is not None else None
    return made


def _captured(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], micro_batches: int) -> Captured:
    """Return the graph of a call with whole tensors; with stages, of one of its micro batches."""

    def first(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            leaf = torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)
        return micro_batches_of(leaf, micro_batches)[0]

    return capture(module, *pytree.tree_map(first, (list(args), dict(kwargs))))


@dataclass(frozen=True, slots=True)
class _Question:
    """A request: the mesh, the arguments of `request`, and a module to capture again, or why there is none."""

    module: nn.Module | UserError | None
    mesh: Mapping[str, int]
    constraints: Mapping[str, Any]
    cluster: str | None
    memory_limit: float | None

    def captured(self, args: Sequence[Any], kwargs: Mapping[str, Any], like: Captured) -> Captured:
        """Return the graph of a call with other sizes. Raises UserError if its parameters differ from those of `like`,
        or the module could not be copied.
        """
        assert self.module is not None  # noqa: S101 - by the caller
        if isinstance(self.module, UserError):
            raise self.module
        batches = int((self.constraints.get("stages") or {}).get("micro_batches", 1))
        found = _captured(self.module, args, kwargs, batches)
        names = [{one.target for one in each.graph.inputs if one.kind in {PARAMETER, BUFFER}} for each in (found, like)]
        if names[0] != names[1]:
            raise UserError(
                f"a call of other sizes uses other parameters ({', '.join(sorted(names[0] ^ names[1])[:3])})",
                remedy="shard the module once more with these arguments",
            )
        return found

    def program(self, captured: Captured, like: ShardedModule | None = None) -> RunnableProgram:
        """Return the program of a graph, on every rank; its inputs are placed like those of `like`."""
        placements = {**self.constraints["placements"], **({} if like is None else self._chosen(like))}
        document = request(captured, self.mesh, **{**self.constraints, "placements": placements})
        return _planned_once(document, self.cluster, self.memory_limit)

    def _chosen(self, like: ShardedModule) -> dict[str, Sequence[str]]:
        """Return the placements of inputs that the planner chose."""
        patterns, program = self.constraints.get("choose", ()), like.program
        return {
            one.name: tokens_of(placements_of(program.buffers[program.inputs[one.name]], program))
            for one in like.captured.graph.inputs
            if one.kind != CONSTANT
            and one.name in program.inputs
            and any(fnmatchcase(name, pattern) for name in (one.name, one.target) for pattern in patterns)
        }


def _mesh_sizes(mesh: DeviceMesh | Mapping[str, int]) -> dict[str, int]:
    if not isinstance(mesh, DeviceMesh):
        return dict(mesh)
    if mesh.mesh_dim_names is None:
        raise BadInput("the device mesh has no names", remedy="init_device_mesh(..., mesh_dim_names=...)")
    return dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


def _planned_once(document: Mapping[str, Any], cluster: str | None, memory_limit: float | None) -> RunnableProgram:
    """Return the program that rank 0 got from the planner, on every rank. Raises UserError on all ranks if there is
    none.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return plan(document, cluster=cluster, memory_limit=memory_limit)
    device = _device()
    answer = b""
    if dist.get_rank() == 0:
        try:
            answer = b"+" + msgspec.json.encode(plan(document, cluster=cluster, memory_limit=memory_limit))
        except PlannerError as error:
            answer = b"-" + str(error).encode()
    size = torch.tensor([len(answer)], device=device)
    dist.broadcast(size, 0)
    text = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        text.copy_(torch.frombuffer(bytearray(answer), dtype=torch.uint8))
    dist.broadcast(text, 0)
    answer = bytes(text.cpu().numpy())
    if not answer.startswith(b"+"):
        raise UserError("the module is not sharded", why=answer[1:].decode())
    return read_program(msgspec.json.decode(answer[1:]), where="the planner's program")


def _device() -> torch.device:
    """Return the device of this rank: CUDA where the default process group talks between GPUs."""
    on_gpu = dist.is_initialized() and "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


class ShardedModule(nn.Module):
    """A module as a program on this rank. Parameters and buffers are DTensors under their names in the module
    (`weights.py`).
    """

    def __init__(
        self,
        module: nn.Module | None,
        captured: Captured,
        program: RunnableProgram,
        mesh: DeviceMesh | None = None,
        asked: Collection[str] = (),
        like: ShardedModule | None = None,
    ) -> None:
        """`asked` names inputs that need gradients, in addition to the program's. With `like`, the same module at other
        sizes, its parameters are used.
        """
        super().__init__()
        self.training = captured.training
        device = _device()
        self.asked = frozenset((*program.gradients, *asked))
        self.program = program
        self.captured = captured
        at, some = place_in(mesh, program)
        self.ranks: RankProgram = RankProgram(
            program, at, device, mesh if some else None, None if like is None else like.ranks
        )
        self.mesh = mesh or init_device_mesh(device.type, program.mesh_shape, mesh_dim_names=program.mesh_names)
        self.weights = Weights(self if like is None else like, self.mesh, self.ranks)
        if module is not None:
            self.weights.fill(module, captured)
        else:
            self.weights.share(captured)
        self.question: _Question | None = None
        self._sized: dict[Any, ShardedModule] = {}  # by shapes of the arguments, the most recently called last
        read = {name for data in program.instructions for name in data.get("reads", ())}
        leads = read | set(program.gradients.values())
        self.graded = [name in leads for name in program.seeds] or [False] * len(program.outputs)  # by result

    def placements(self, tensor: str) -> tuple[Placement, ...]:
        """Return the DTensor placements of a tensor of the graph: an input's, or an output's."""
        inputs, outputs = self.program.inputs, self.captured.graph.outputs
        buffer = inputs.get(tensor) or inputs.get(f"{tensor}[0]")
        buffer = buffer or self.program.outputs[outputs.index(tensor)]
        return placements_of(self.program.buffers[buffer], self.program)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's results as DTensors. Inputs are whole tensors, or DTensors with the plan's placements.

        A call with other sizes has a program of its own; the first call with these sizes asks the planner for it, on
        all ranks. Raises BadInput for sizes with which the module has another graph, and for dtypes or flags other than
        the captured ones.
        """
        own = self._of_sizes(args, kwargs)
        if own is not self:
            return own.forward(*args, **kwargs)
        values = self._values(args, kwargs)
        found = Run.apply(self, tuple(values), *values.values())
        for buffer, name in self.captured.written.items():
            at = self.captured.graph.outputs.index(name)
            self.weights.write(buffer, found[at].detach(), self.placements(name), self.program.outputs[at])
        return self._results(found)

    @torch.no_grad()
    def step(self, *args: Any, gradients: Sequence[torch.Tensor], **kwargs: Any) -> Any:
        """Run forward and backward with the gradients of all results, whole tensors; add to `grad` of the parameters.

        For a module with pipeline stages in 1F1B, whose passes take turns; others may run so, too. Returns the results.
        """
        own = self._of_sizes(args, kwargs)
        if own is not self:
            return own.step(*args, gradients=gradients, **kwargs)
        batches, names = self.program.micro_batches, self.captured.graph.outputs
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))):
            raise BadInput(
                "a step of arguments that require gradients", remedy="hand in x.detach(), or call the module"
            )
        if len(gradients) != len(names) or not self.program.seeds:
            raise BadInput(
                f"{len(gradients)} gradients for {len(names)} results",
                remedy="one for each, and a program with a backward pass",
            )
        parts = [micro_batches_of(one, batches) for one in gradients]
        seeds = self.ranks.seeds(parts[at][number] for number in range(batches) for at in range(len(names)))
        found = self.ranks.run({**self._values(args, kwargs), **self.weights.fixed(), **seeds})
        self.weights.add_gradients(found)
        state = State(at=found)
        return self._results([self.ranks.everywhere(name, state) for name in self.program.outputs])

    def _of_sizes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedModule:
        """Return this module, or the same one for the sizes of a call if only sizes differ from the captured ones."""
        batches, captured = self.program.micro_batches, self.captured
        call = of_one_batch(signature_of(args, kwargs), batches)
        if self.question is None or call is None or not call.differs_in_sizes(captured.call):
            return self
        shapes = tuple(one[0] if is_shaped(one) else None for one in call.leaves)
        sized = self._sized.pop(shapes, None)
        if sized is None:
            other = self.question.captured(args, kwargs, like=captured)
            program = self.question.program(other, like=self)
            sized = ShardedModule(None, other, program, self.mesh, self.asked, like=self)
            if len(self._sized) >= MOST_SIZES:  # a later backward pass holds its own reference
                del self._sized[next(iter(self._sized))]
        self._sized[shapes] = sized
        return sized

    def train(self, mode: bool = True) -> ShardedModule:
        """Return the module. Raises UserError for another mode than the captured one, which the graph is for."""
        if mode != self.captured.training:
            said = "training" if self.captured.training else "evaluation"
            raise UserError(f"the module was captured in {said} mode", remedy="shard it once more in the other one")
        return self

    def _check_gradient(self, name: str, leaf: torch.Tensor) -> None:
        """Raise BadInput if an argument requires a gradient that the program does not compute."""
        if not (leaf.requires_grad and torch.is_grad_enabled()):
            return
        whole_on_stages = self.program.stage_axis and not isinstance(leaf, DTensor)
        if name not in self.asked or not self.program.seeds or whole_on_stages:
            raise BadInput(
                f"{name} requires a gradient, and the program makes none of it",
                why="with pipeline stages, one of them alone would have it" if whole_on_stages else "",
                remedy="shard the module with an argument that requires one, or hand in x.detach()",
            )

    def _values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return this rank's pieces of inputs and parameters by buffer. Raises BadInput for a call of another form than
        the captured one.
        """
        autocast = ambient_autocast(self.ranks.device.type), self.captured.autocast
        check_call(signature_of(args, kwargs), self.captured.call, self.program.micro_batches, autocast)
        graph_inputs = [one for one in self.captured.graph.inputs if one.kind == INPUT]
        leaves = [leaf for leaf in pytree.tree_leaves((list(args), kwargs)) if isinstance(leaf, torch.Tensor)]
        values: dict[str, torch.Tensor] = {}
        batches = self.program.micro_batches
        for one, leaf in zip(graph_inputs, leaves, strict=True):
            self._check_gradient(one.name, leaf)
            whole = leaf.full_tensor() if isinstance(leaf, DTensor) and batches > 1 else leaf
            for number, part in enumerate(micro_batches_of(whole, batches)):
                buffer = self.program.inputs.get(f"{one.name}[{number}]" if batches > 1 else one.name)
                if buffer is not None:
                    values[buffer] = self._local(one.name, part, buffer)
        return values | self.weights.pieces(self.weights.parameters)

    def _results(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the pieces of all results as DTensors; those of micro batches are concatenated."""
        names = self.captured.graph.outputs
        found: list[torch.Tensor] = []
        for at, name in enumerate(names):
            places, shape = self.placements(name), self.program.buffers[self.program.outputs[at]].shape
            parts: list[torch.Tensor] = [as_dtensor(v, self.mesh, places, shape) for v in outputs[at :: len(names)]]
            found.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        tree = self.captured.result_tree
        if tree is None:
            return tuple(found)
        leaves = [found[one.number] if isinstance(one, Output) else one for one in self.captured.results]
        return pytree.tree_unflatten(leaves, tree)

    def _local(self, name: str, value: torch.Tensor, buffer: str) -> torch.Tensor:
        if isinstance(value, DTensor):
            if tuple(value.placements) != self.placements(name):
                raise BadInput(
                    f"{name} comes as {value.placements}, and the program takes {self.placements(name)}",
                    remedy="redistribute it, or shard the module with these placements",
                )
            return value.to_local()
        about, ranks = self.program.buffers[buffer], self.ranks
        piece: torch.Tensor = Piece.apply(value.to(ranks.device), ranks.place, about, ranks.everyone)
        return piece
