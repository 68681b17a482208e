"""Whether a program ends, found without running it: its streams go on as far as they can, and what they then wait for.

Symmetric ranks are looked at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator

from simulator.program.fold import Folding, meeting_keys
from simulator.program.program import HOST, Collective, Instruction, RecordEvent, Recv, Send, WaitEvent, label

Node = tuple[int, str]  # (rank class, stream)


class _Untimed:
    """Runs a program without time: whatever can proceed does, until nothing can."""

    def __init__(self, folding: Folding) -> None:
        self.folding = folding
        self.keys = [meeting_keys(c) for c in folding.classes]
        self.queues: dict[Node, deque[int]] = {}  # issued but not begun: positions in the code
        self.issued = [0] * len(folding.classes)
        self.fired: set[tuple[int, str]] = set()
        self.arrived: dict[Hashable, set[Node]] = {}
        self.over: set[Hashable] = set()
        self.streams = [tuple(dict.fromkeys(i.stream for i in c.code.instructions)) for c in folding.classes]
        for c in folding.classes:
            for stream in self.streams[c.index]:
                self.queues[c.index, stream] = deque()

    def run(self) -> bool:
        """Return whether every instruction was carried out."""
        ready = deque(range(len(self.folding.classes)))
        while ready:
            index = ready.popleft()
            woken = self._advance(index)
            ready.extend(other for other in woken if other not in ready)
        return not any(self.queues.values()) and all(
            self.issued[c.index] == len(c.code.instructions) for c in self.folding.classes
        )

    def _advance(self, index: int) -> set[int]:
        """Let all streams of a rank class proceed as far as they can; return the classes that may then proceed."""
        code = self.folding.classes[index].code.instructions
        woken: set[int] = set()
        progress = True
        while progress:
            progress = False
            while self.issued[index] < len(code):
                instruction = code[self.issued[index]]
                if instruction.stream == HOST:
                    if not self._passes((index, HOST), self.issued[index], woken):
                        break
                else:
                    self.queues[index, instruction.stream].append(self.issued[index])
                self.issued[index] += 1
                progress = True
            for stream in self.streams[index]:
                queue = self.queues[index, stream]
                while queue and self._passes((index, stream), queue[0], woken):
                    queue.popleft()
                    progress = True
        return woken

    def _passes(self, node: Node, position: int, woken: set[int]) -> bool:
        index = node[0]
        instruction = self.folding.classes[index].code.instructions[position]
        match instruction:
            case RecordEvent(event=name):
                self.fired.add((index, name))
            case WaitEvent(event=name):
                return (index, name) in self.fired
            case Collective() | Send() | Recv():
                key = self.keys[index][position]
                if key not in self.over:
                    arrived = self.arrived.setdefault(key, set())
                    arrived.add((index, "recv" if isinstance(instruction, Recv) else "in"))
                    if len(arrived) < self._expected(index, instruction):
                        return False
                    self.over.add(key)
                    woken.update(member for member, _ in arrived if member != index)
            case _:
                pass
        return True

    def _expected(self, index: int, instruction: Collective | Send | Recv) -> int:
        if not isinstance(instruction, Collective):
            return 2
        return len(self.folding.classes[index].meetings["collective", instruction.group, 0, False].classes)

    # --- why it stopped -----------------------------------------------------------------------------------------

    def head(self, node: Node) -> Instruction | None:
        """Return the instruction at which a stream is stuck; None if it has none left."""
        index, stream = node
        code = self.folding.classes[index].code.instructions
        if stream == HOST:
            return code[self.issued[index]] if self.issued[index] < len(code) else None
        queue = self.queues.get(node)
        return code[queue[0]] if queue else None

    def waits_for(self, node: Node) -> list[Node]:
        index, stream = node
        instruction = self.head(node)
        if instruction is None:
            return []
        if isinstance(instruction, WaitEvent):
            code = self.folding.classes[index].code.instructions
            for position, other in enumerate(code):
                if isinstance(other, RecordEvent) and other.event == instruction.event:
                    return [(index, other.stream if position < self.issued[index] else HOST)]
            return []
        position = self.issued[index] if stream == HOST else self.queues[node][0]
        return [n for n in self._absent(self.keys[index][position]) if n != node]

    def _absent(self, key: Hashable) -> Iterator[Node]:
        """Return the streams that have not yet arrived at a transfer."""
        here = self.arrived.get(key, set())
        for c in self.folding.classes:
            for position, (other, other_key) in enumerate(zip(c.code.instructions, self.keys[c.index], strict=True)):
                side = "recv" if isinstance(other, Recv) else "in"
                if other_key == key and (c.index, side) not in here:
                    yield (c.index, other.stream if position < self.issued[c.index] else HOST)


def find_deadlock(folding: Folding) -> str:
    """Return a sentence about the cycle of waits, or about a wait for something that cannot happen; empty if the
    program ends.
    """
    machine = _Untimed(folding)
    if machine.run():
        return ""
    nodes = [(c.index, stream) for c in folding.classes for stream in dict.fromkeys([HOST, *machine.streams[c.index]])]
    stuck = [node for node in nodes if machine.head(node) is not None]
    for start in stuck:
        path: list[Node] = []
        seen: dict[Node, int] = {}
        node: Node | None = start
        while node is not None and node not in seen:
            seen[node] = len(path)
            path.append(node)
            node = next(iter(machine.waits_for(node)), None)
        if node is not None:
            steps = [_step(machine, n) for n in path[seen[node] :]]
            return " waits for ".join([*steps, steps[0]])
    return "; ".join(f"{_step(machine, node)} waits for what never comes" for node in stuck[:4])


def _step(machine: _Untimed, node: Node) -> str:
    head = machine.head(node)
    rank = machine.folding.classes[node[0]].representative
    return f"rank {rank} {node[1]} ({label(head) if head else 'nothing left'})"
