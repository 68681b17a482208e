"""Collectives of a step of an engine: sums over ranks by the kernels that it tries, and all others by NCCL."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from simulator.collectives.algorithms import CUSTOM_ALGORITHMS
from simulator.collectives.communicator import Fabric
from simulator.collectives.cost import CollectiveModel
from simulator.collectives.measured import MeasuredCollectives
from simulator.columns.plan_table import Floats
from simulator.serving.deployment import Pool
from simulator.serving.kernel_tables import reduce_kernels
from topology.cluster import Cluster
from topology.rates.groups import GroupShape

# FlashInfer's sums over ranks with the residual and the norm after them, taken wherever their time is known.
WITH_NORM = ("flashinfer", "mnnvl")


@dataclass(slots=True, kw_only=True)
class StepCollectives:
    """Sizes are bytes of a rank, times seconds. `kernels` are those of all-reduces, by their names in engines.toml, on
    GPUs of a `generation`; `timed` has measured collectives.
    """

    cluster: Cluster
    kernels: tuple[str, ...]
    generation: str
    timed: MeasuredCollectives | None = None
    _model: CollectiveModel = field(init=False)

    def __post_init__(self) -> None:
        self._model = CollectiveModel(self.cluster, self.timed)
        with_norm = next((kernel for kernel in self.kernels if kernel in WITH_NORM), "")
        if with_norm:  # its time includes the norm, which the others' do not
            known = (with_norm, self.generation) in reduce_kernels()
            others = tuple(kernel for kernel in self.kernels if kernel != with_norm)
            self.kernels = (with_norm, "nccl") if known else others

    def run(self, op: str, nbytes: Floats, ranks: int) -> Floats:
        """Return the seconds of a collective as NCCL chooses to run it."""
        return np.zeros_like(nbytes) if ranks == 1 else self._model.time_s(op, nbytes, self._shape(ranks))

    def all_reduce(self, nbytes: Floats, ranks: int) -> Floats:
        """Return the seconds of an all-reduce by the fastest of the kernels."""
        if ranks == 1:
            return np.zeros_like(nbytes)
        return np.asarray(np.min([self._reduced_by(name, nbytes, ranks) for name in self.kernels], axis=0))

    def between_stages(self, nbytes: Floats, pool: Pool) -> Floats:
        """Return the seconds of sending activations from one stage of a pool to the next."""
        ranks = pool.ranks * pool.pp
        inside = ranks <= self.cluster.gpus_per_node
        shape = GroupShape(ranks=2, ranks_per_node=2 if inside else 1, siblings=pool.ranks)
        return self._model.time_s("send_recv", nbytes, shape)

    def _reduced_by(self, name: str, nbytes: Floats, ranks: int) -> Floats:
        shape = self._shape(ranks)
        reduced = partial(self._model.time_s, "all_reduce", nbytes, shape)
        if name == "nccl":
            return reduced()
        if name in CUSTOM_ALGORITHMS:
            return reduced(algorithm=name)
        listed = reduce_kernels().get((name, self.generation))
        comm = self._model.communicator(shape)
        if listed is None or comm.nodes > 1 or comm.fabric is Fabric.PCIE:
            return np.asarray(np.minimum(reduced(algorithm="one_shot"), reduced(algorithm="two_shot")))
        return listed.seconds(nbytes, ranks, comm.link_bytes_per_s)

    def _shape(self, ranks: int) -> GroupShape:
        return GroupShape(ranks=ranks, ranks_per_node=min(ranks, self.cluster.gpus_per_node))
