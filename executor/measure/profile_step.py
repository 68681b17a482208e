"""One training step under torch's profiler, after the timed steps: a timeline of kernels by stream.

The profiler slows the host down, so this step is never used for the step time. Of the profiler's events, kernels,
copies and the outermost host operators are kept; nested operators are redundant, and synchronisations are waiting, not
work. The file remains a Kineto trace, which Perfetto opens and `simulator.program.chrome_trace.from_kineto` reads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from executor.gpu.device import synchronize
from executor.measure.traced_operators import traced_operators
from topology import codec
from topology.codec import JsonObject
from topology.profile.samples import OperatorSample

ON_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
ON_HOST = frozenset({"cpu_op", "cuda_runtime", "cuda_driver"})


def profile_step(
    step: Callable[[], object], device: torch.device, path: Path, *, rank: int
) -> tuple[str, list[OperatorSample]]:
    """Run `step` under the profiler and write its trace to `path`.

    Returns (error message or "", samples of the step's operators by shape). The step runs whether or not the profiler
    works, since the other ranks run it, too.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities, record_shapes=True)
    try:
        profiler.start()
    except RuntimeError as error:  # another profiler is attached, or the driver refuses counters
        step()
        return str(error), []
    step()
    synchronize(device)
    try:
        profiler.stop()
        with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
            raw = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(raw))
            document = json.loads(raw.read_text(encoding="utf-8", errors="replace"))
        codec.write_text(path, json.dumps(trimmed(document, rank=rank)))
        return "", traced_operators(document)
    except (RuntimeError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return str(error), []


def trimmed(document: JsonObject, *, rank: int) -> JsonObject:
    """Return the kept events, without arguments that are not used."""
    spans = [e for e in document["traceEvents"] if e.get("ph") == "X"]
    kept = [_short(e) for e in spans if e.get("cat") in ON_GPU]
    host = [e for e in spans if e.get("cat") in ON_HOST and "Synchronize" not in str(e.get("name"))]
    host.sort(key=lambda e: (str(e.get("tid")), e["ts"], -e["dur"]))
    thread, end = None, 0.0
    for event in host:
        if str(event.get("tid")) != thread:
            thread, end = str(event.get("tid")), -1.0
        if event["ts"] >= end:
            kept.append(_short(event))
            end = event["ts"] + event["dur"]
    return {"traceEvents": kept, "distributedInfo": {"rank": rank}, "displayTimeUnit": "ms"}


def _short(event: JsonObject) -> JsonObject:
    short: JsonObject = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur") if key in event}
    arguments = event.get("args")
    if isinstance(arguments, dict) and "stream" in arguments:
        short["args"] = {"stream": arguments["stream"]}
    return short
