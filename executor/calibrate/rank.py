"""One rank of a pool: joins the others, then runs the jobs it receives until its pipe is closed.

A failed job is reported and the rank takes the next one; if only some ranks of a pool failed, its owner ends it
(`executor.calibrate.rank_pool`).
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from executor.calibrate.contention import measure_pair
from executor.calibrate.kernels import Unsupported
from executor.calibrate.layers import compile_layers, record_layers, titan_versions
from executor.calibrate.operators import OperatorTimes, time_host, versions
from executor.calibrate.overlap import measure_shape
from executor.calibrate.rank_request import RankRequest
from executor.gpu.device import synchronize
from executor.gpu.monitor import ClockMonitor
from executor.launch.records import Deadline, Recorder
from executor.measure.probe_collectives import record_sizes
from simulator.calibration.items import CollectiveItem, ContentionItem, LayerItem, OperatorItem, OverlapItem
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput, PlannerError
from topology.profile.profile import CollectiveSample
from topology.profile.samples import HostSample, Sample

# Imported once, in the process from which ranks are forked, since it takes seconds; without it that process must still
# start.
with suppress(Exception):
    import torchtitan.train  # noqa: F401

PARENT_S = 1.0  # seconds between two checks that the parent is alive
MEETING_POLL_S = 0.01
GROUP_S = 600.0  # timeout of a collective; jobs have shorter limits of their own
# Errors of requests that cannot be run; after any other error the state of the process is unknown.
REFUSALS = (PlannerError, Unsupported, ImportError)

Job = JsonObject  # one JSON message of the pipe
T = TypeVar("T")


class SampleRecorder(Recorder):
    """Records samples with `at_s`, the seconds from the beginning of the calibration to the end of the sample."""

    def __init__(self, path: str | None, began: float) -> None:
        super().__init__(path)
        self.began = began

    def write(self, kind: str, **fields: Any) -> None:
        sample = fields.get("sample")
        if isinstance(sample, Sample | HostSample | CollectiveSample):
            fields["sample"] = replace(sample, at_s=round(time.monotonic() - self.began, 2))
        super().write(kind, **fields)


@dataclass(slots=True, kw_only=True)
class Instruments:
    """The measuring objects of a rank. `indices` are nvidia-smi's of the pool's GPUs."""

    device: torch.device
    recorder: Recorder
    indices: list[int]
    text: str
    operators: OperatorTimes = field(init=False)

    def __post_init__(self) -> None:
        self.operators = OperatorTimes(self.device, self.indices[0])

    def do(self, job: Job) -> None:
        """Run the measurements of a job; a collective call of the pool's ranks."""
        deadline = Deadline(float(job["limit_s"]))
        match job["kind"]:
            case "host":
                time_host(self.device, self.recorder, deadline)
            case "operators":
                self.operators.record(_items(job, OperatorItem), self.recorder, deadline)
            case "collectives":
                asked = [(item.op, item.sizes) for item in _items(job, CollectiveItem)]
                record_sizes(self.device, asked, self.indices, self.recorder)
            case "contention":
                self._each(_items(job, ContentionItem), measure_pair, "contention")
            case "overlap":
                self._each(_items(job, OverlapItem), measure_shape, "overlap")
            case "compile":
                for item in _items(job, LayerItem):
                    compile_layers(self.device, item, text=self.text)
            case "layers":
                for item in _items(job, LayerItem):
                    record_layers(self.device, item, self.recorder, gpu=self.indices[0], text=self.text)
            case kind:
                raise ValueError(f"no job is called {kind}")

    def _each(
        self,
        items: Sequence[T],
        measure: Callable[[torch.device, T, ClockMonitor, int], Sample | str],
        kind: str,
    ) -> None:
        """Record a sample for every item, with the clocks that rank 0 read meanwhile."""
        with ClockMonitor(reads=self.device.type == "cuda" and dist.get_rank() == 0) as watch:
            for item in items:
                sample = measure(self.device, item, watch, self.indices[0])
                if isinstance(sample, str):
                    self.recorder.missing(f"{kind} of {sample}")
                else:
                    self.recorder.write(kind, sample=sample)


def _items(job: Job, kind: type[T]) -> list[T]:
    return [codec.convert(item, kind, where="job") for item in job["items"]]


def main(message: str, pipe: Connection) -> None:
    """Run as the rank described by `message` (JSON of a `RankRequest`) until the pipe is closed; ends the process."""
    os.setsid()  # so that killing this rank also reaches the compiler's processes
    request = codec.convert(codec.parse_json(message, where="rank"), RankRequest, where="rank")
    folder = Path(request.folder)
    log = os.open(folder / f"rank{request.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = str(folder)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        station = _join(request)
    except BaseException as error:  # noqa: BLE001 - any error is reported
        _say(pipe, failed=describe_error(error), over=True)
        os._exit(1)
    _say(pipe, over=True)
    while (job := _next_job(pipe)) is not None:
        try:
            station.do(job)
            _say(pipe, over=True)
        except Exception as error:  # noqa: BLE001 - another framework can raise anything
            _say(
                pipe,
                failed=_layers_in_words(job) + describe_error(error),
                refused=isinstance(error, REFUSALS),
                over=True,
            )
    os._exit(0)  # ranks of other pools may be in a collective: no orderly exit


def _layers_in_words(job: Job) -> str:
    if job["kind"] in {"layers", "compile"}:
        with suppress(BadInput):  # the cause of the job's failure
            return f"{_items(job, LayerItem)[0]}: "
    return ""


def describe_error(error: BaseException) -> str:
    """Return the kind of an error and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:300] if text else 'no message'}"


def _join(request: RankRequest) -> Instruments:
    """Join the pool's process group and run one collective on the device, which sets up connections for later ones."""
    rank, gpus = request.rank, request.gpus
    cuda, world = request.device == "cuda", len(gpus)
    local, store = gpus[rank], _meeting_point(rank, Path(request.folder) / "port")
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=GROUP_S))
    dist.all_reduce(torch.ones(8, device=device))
    dist.barrier()
    synchronize(device)
    recorder = SampleRecorder(request.records if rank == 0 else None, request.began)
    recorder.write("header", versions=versions(request.device) | titan_versions())
    indices = [request.indices[position] for position in gpus]
    return Instruments(device=device, recorder=recorder, indices=indices, text=request.text)


def _meeting_point(rank: int, path: Path) -> Any:
    """Return the store of a pool; the first rank hosts it, at a port chosen by the system and written to `path`."""
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - in torch.distributed, which does not export it

    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        part = path.with_suffix(".part")
        part.write_text(str(store.port))
        part.replace(path)
        return store
    while not path.is_file():  # the pool's owner ends it if this takes too long
        time.sleep(MEETING_POLL_S)
    return TCPStore("127.0.0.1", int(path.read_text()), is_master=False)


def _next_job(pipe: Connection) -> Job | None:
    try:
        return dict(json.loads(pipe.recv_bytes()))
    except (EOFError, OSError):
        return None


def _say(pipe: Connection, **answer: Any) -> None:
    with suppress(OSError):
        pipe.send_bytes(json.dumps(answer).encode())


def _end_with_parent(parent: int) -> None:
    """End this rank, even in a collective, when the process that forked it has ended."""
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os.killpg(0, signal.SIGKILL)
