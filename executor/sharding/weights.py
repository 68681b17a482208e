"""Parameters and buffers of a sharded module: DTensors, under their names in the module.

Optimizers, `clip_grad_norm_`, `state_dict` and checkpoints find them like those of any module. A tensor that the
program does not use is included, whole on every rank. With pipeline stages, a rank has those of its stage, on the mesh
without the stage axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from executor.sharding.capture import Captured
from executor.sharding.places import placements_of
from executor.sharding.run_program import RankProgram
from simulator.sharded.graph import BUFFER, CONSTANT, PARAMETER
from topology.errors import UserError


class _Names(nn.Module):
    """A module that has parameters, buffers and submodules under their names, and computes nothing."""


@dataclass(slots=True)
class Weights:
    """The tensors of a module in `root`: by buffer of the program, names of parameters and buffers, and constants."""

    root: nn.Module
    mesh: DeviceMesh
    ranks: RankProgram
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def fill(self, module: nn.Module, captured: Captured) -> None:
        """Give `root` this rank's pieces of the tensors of `module`."""
        program, used = self.ranks.program, self.ranks.used
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        done: dict[int, torch.Tensor] = {}
        for one in captured.graph.inputs:
            buffer = program.inputs.get(one.name)
            if buffer is None or buffer not in used or one.kind not in {PARAMETER, BUFFER, CONSTANT}:
                continue
            whole = captured.constants.get(one.name, parameters.get(one.target, buffers.get(one.target)))
            about = program.buffers[buffer]
            with torch.no_grad():
                piece = self.ranks.place.piece(cast("torch.Tensor", whole).to(self.ranks.device), about)
            if one.kind == CONSTANT:
                self.constants[buffer] = piece
                continue
            placed = self.placed(piece, placements_of(about, program), about.shape)
            trained = one.kind == PARAMETER and one.name in program.gradients
            done[id(whole)] = nn.Parameter(placed, requires_grad=trained) if one.kind == PARAMETER else placed
            (self.parameters if one.kind == PARAMETER else self.buffers)[buffer] = one.target
        for name, whole in {**parameters, **buffers}.items():
            if id(whole) not in done and not program.stage_axis:
                placed = self.placed(whole.detach().to(self.ranks.device), (), whole.shape)
                done[id(whole)] = nn.Parameter(placed, whole.requires_grad) if name in parameters else placed
            if id(whole) in done:
                self._register(name, done[id(whole)], module)

    def share(self, captured: Captured) -> None:
        """Use the tensors of `root`, of the same module at other sizes. Raises UserError if they are placed
        differently.
        """
        program, ranks = self.ranks.program, self.ranks
        for one in captured.graph.inputs:
            buffer = program.inputs.get(one.name)
            if buffer is None or buffer not in ranks.used or one.kind not in {PARAMETER, BUFFER, CONSTANT}:
                continue
            about = program.buffers[buffer]
            if one.kind == CONSTANT:
                self.constants[buffer] = ranks.place.piece(captured.constants[one.name].to(ranks.device), about)
                continue
            have = self.parameter(one.target)
            if isinstance(have, DTensor) and tuple(have.placements) != self._on_stage(placements_of(about, program)):
                raise UserError(
                    f"{one.target} lies otherwise at these sizes", remedy="a placement for it, or shard the module anew"
                )
            (self.parameters if one.kind == PARAMETER else self.buffers)[buffer] = one.target

    def placed(self, piece: torch.Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's piece as part of a DTensor of `shape` on the ranks that have it; without placements, a
        copy on all.
        """
        names, stages = self.ranks.program.mesh_names, self.ranks.program.stage_axis
        kept = [name for name in names if name != stages]
        if not kept:
            return piece
        mesh = self.mesh[tuple(kept)] if stages else self.mesh
        return as_dtensor(piece, mesh, self._on_stage(placements or (Replicate(),) * len(names)), shape)

    def _on_stage(self, placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Return placements without that of the axis of stages."""
        program = self.ranks.program
        both = zip(program.mesh_names, placements, strict=True)
        return tuple(one for name, one in both if name != program.stage_axis)

    def _register(self, name: str, value: torch.Tensor, module: nn.Module) -> None:
        """Register `value` under its name in the module. Tables are written directly, since names may equal our
        attributes.
        """
        *path, last = name.split(".")
        holder, original = self.root, module
        for part in path:
            holder = _table(holder, "_modules").setdefault(part, _Names())
            original = cast("nn.Module", _table(original, "_modules")[part])
        if isinstance(value, nn.Parameter):
            _table(holder, "_parameters")[last] = value
            return
        _table(holder, "_buffers")[last] = value
        if last in _table(original, "_non_persistent_buffers_set"):
            _table(holder, "_non_persistent_buffers_set").add(last)

    def parameter(self, name: str) -> torch.Tensor | None:
        """Return the parameter under a name at present, since callers may have replaced it."""
        *path, last = name.split(".")
        holder: nn.Module | None = self.root
        for part in path:
            holder = None if holder is None else _table(holder, "_modules").get(part)
        if holder is None:
            return None
        found: torch.Tensor | None = _table(holder, "_parameters").get(last, _table(holder, "_buffers").get(last))
        return found

    def pieces(self, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return this rank's pieces by buffer of the program."""
        return {buffer: local(cast("torch.Tensor", self.parameter(name))) for buffer, name in names.items()}

    def fixed(self) -> dict[str, torch.Tensor]:
        """Return, by buffer of the program, the tensors that need no gradient."""
        return {**self.constants, **self.pieces(self.buffers)}

    @torch.no_grad()
    def write(self, name: str, piece: torch.Tensor, placements: tuple[Placement, ...], of: str) -> None:
        """Set a buffer to `piece`, moved from the given placement to that of the buffer; `of` is its buffer in the
        program.
        """
        *path, last = name.split(".")
        holder = self.root
        for part in path:
            holder = cast("nn.Module", _table(holder, "_modules")[part])
        made = self.placed(piece, placements, self.ranks.program.buffers[of].shape)
        before = _table(holder, "_buffers")[last]
        if isinstance(made, DTensor) and isinstance(before, DTensor):
            made = made.redistribute(before.device_mesh, before.placements)
        _table(holder, "_buffers")[last] = made

    def add_gradients(self, found: Mapping[str, torch.Tensor]) -> None:
        """Add this rank's pieces of gradients, by buffer of the program, to the parameters' `grad`."""
        program = self.ranks.program
        tensors = {buffer: tensor for tensor, buffer in program.inputs.items()}
        for buffer, name in self.parameters.items():
            piece, parameter = found.get(program.gradients.get(tensors[buffer], "")), self.parameter(name)
            if piece is None or parameter is None:
                continue
            about = program.buffers[buffer]
            gradient = self.placed(piece, placements_of(about, program), about.shape)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _table(module: nn.Module, name: str) -> Any:
    """Return one of torch's tables of a module, by its name, since attributes may have the names of tensors."""
    return vars(module)[name]


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a tensor; gradients pass through."""
    return value.to_local() if isinstance(value, DTensor) else value


def as_dtensor(
    piece: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...] | list[Placement], shape: tuple[int, ...]
) -> DTensor:
    """Return this rank's piece as part of a DTensor of `shape`, whose pieces may differ in size."""
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)
