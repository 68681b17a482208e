"""Write the steps of a block as instructions: kernels in order on the compute stream, transfers between them or at the
same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from simulator.lowering.steps import KernelKey, KernelStep, PiecesStep, SiteStep, Step, TransferStep
from simulator.passes.steps import Wait
from simulator.program.cost_model import Cost
from simulator.program.program import COMPUTE, CodeWriter, Launch

PEER_COPY = "peer"  # a copy engine reads a shard from another GPU of the node


def launch_key(launch: Launch) -> KernelKey:
    """Return the key under which a launch's cost was registered."""
    return (launch.name, launch.shape, launch.dtype)


@dataclass(slots=True)
class StepWriter:
    """Writes steps into the code of any rank and keeps the cost of each launch, peer copy and copy within a GPU."""

    kernels: dict[KernelKey, tuple[Cost, float]] = field(default_factory=dict)
    peer_copies: dict[int, float] = field(default_factory=dict)  # bytes -> seconds
    own_copies: dict[tuple[str, int], float] = field(default_factory=dict)  # (kind, bytes) -> seconds
    _launches: dict[KernelKey, Launch] = field(default_factory=dict)

    def write(self, code: CodeWriter, steps: Iterable[Step]) -> None:
        for step in steps:
            match step:
                case KernelStep():
                    self.launch(code, step)
                case TransferStep():
                    stream = f"{step.group} comm"
                    code.after(stream, COMPUTE)
                    if step.op == "send_recv":
                        code.exchange(step.group, 1, step.nbytes, tag="back", stream=stream)
                    else:
                        code.collective(step.op, step.group, step.nbytes, stream=stream)
                    code.after(COMPUTE, stream)
                case PiecesStep():
                    self._pieces(code, step)
                case SiteStep():
                    self._site(code, step)
                case Wait():
                    if step.call_s:
                        code.host_work("read", step.call_s)
                    code.synchronize(COMPUTE)

    def launch(self, code: CodeWriter, step: KernelStep) -> None:
        launch = self._launches.get(step.key)
        if launch is None:
            name, shape, dtype = step.key
            launch = self._launches[step.key] = Launch(name=name, shape=shape, dtype=dtype)
            self.kernels[step.key] = (step.cost, step.host_s)
        code.add(launch)
        if step.more_host_s:
            # The device starts the first of several launches while the host issues the others.
            code.host_work(f"issue {step.key[0]}", step.more_host_s)

    def copy(self, code: CodeWriter, kind: str, nbytes: int, seconds: float, *, stream: str) -> None:
        """Write a copy within the GPU that runs next to compute."""
        self.own_copies[kind, nbytes] = seconds
        code.copy(nbytes, kind, stream=stream)

    def _pieces(self, code: CodeWriter, step: PiecesStep) -> None:
        """Fetch a shard while the present piece computes, the rank's own first; the next piece waits for both."""
        copied = step.hop_s is not None
        stream = f"{step.group} {'copies' if copied else 'comm'}"
        if step.hop_s is not None:
            self.peer_copies[step.nbytes] = step.hop_s
        for turn in range(step.ranks):
            more = turn < step.ranks - 1
            if copied:
                code.host_work("issue copies", step.copies_host_s)
            if more:
                code.after(stream, COMPUTE)
                if copied:
                    code.copy(step.nbytes, PEER_COPY, stream=stream)
                else:
                    code.exchange(step.group, 1, step.nbytes, tag="ring", stream=stream)
            self.launch(code, step.piece)
            if more:
                code.after(COMPUTE, stream)

    def _site(self, code: CodeWriter, step: SiteStep) -> None:
        """Launches as long as the pair; its shards are shown as copies that nothing waits for."""
        transfer, stream = step.transfer, f"{step.transfer.group} copies"
        shard = round(transfer.nbytes / transfer.ranks)
        self.peer_copies[shard] = step.hop_s
        code.after(stream, COMPUTE)
        for _ in range(transfer.ranks - 1):
            code.copy(shard, PEER_COPY, stream=stream)
        self.launch(code, step.kernel)
        if step.exposed.cost.seconds > 0:
            self.launch(code, step.exposed)
        # The device starts the first calls while the host issues the others.
        code.host_work(f"issue {step.mode}", step.more_host_s)
