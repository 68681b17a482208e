"""Run a plan on real devices and write a report: `python -m executor.run.apply --request FILE --out DIR --budget S`.

Started by `planner apply` in its own process. It starts the ranks through `executor.launch.local_ranks`, waits, and
writes `run.json` from their records, however they ended: an incomplete run is reported as far as it came, with its
status. Never imports torch.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from executor.gpu.faults import GpuFault
from executor.gpu.monitor import GpuMonitor, GpuSummary, Sample, summarise
from executor.launch.heartbeat import find_suspects, read_heartbeats
from executor.launch.legal import check
from executor.launch.local_ranks import Failure, LaunchResult, Rendezvous, command, launch, loopback_environment
from executor.launch.nodes import (
    LATE_S,
    combine_agent_results,
    name_rendezvous,
    node_name,
    not_launched,
    wait_for_file,
    write_agent_result,
    write_agent_start,
)
from executor.launch.process_exit import exit_code_of
from executor.launch.request import Request
from executor.launch.roll_call import why_no_interface, why_no_meeting
from executor.parallel.facts import MeshFacts, ModelFacts
from executor.run.effects import operator_table, read_back
from executor.run.rank_records import RankRecords, first_record
from executor.run.step_summary import slow_ranks, summarise_steps
from simulator.config.plan import rank_grid
from simulator.program.chrome_trace import from_kineto
from simulator.program.trace import Trace
from simulator.runtimes.environment import assumed_environment
from topology import codec
from topology.codec import JsonObject
from topology.errors import BadInput, BadPlan, PlannerError
from topology.units import MIB
from topology.versions import versions

ENDING_S = 10.0  # of the budget, for ending ranks and writing the report
GRACE_S = 4.0
MODULE = "executor.run.worker"
MAX_TRACE_BYTES = 256 * MIB


def main(argv: Sequence[str] | None = None) -> int:
    """Run a plan. Returns 0 when all steps ran, 1 when not, 2 for an invalid plan, 4 when memory was full, 130 on
    Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="executor.run.apply")
    parser.add_argument("--request", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--nodes", type=int, default=1, help="of several nodes this is one, with an agent of its own")
    parser.add_argument("--endpoint", default="", help="HOST:PORT where the agents of several nodes meet")
    parser.add_argument("--address", default="", help="this node's address, where its host name does not lead to it")
    parser.add_argument("--meeting", default="meshwright", help="the name of their meeting, the same on all")
    parser.add_argument("--names", default="", help="all nodes' names, with commas, to name missing ones")
    parser.add_argument("--join", type=float, default=math.inf, help="seconds to wait for the other nodes")
    parser.add_argument("--collect", action="store_true", help="start nothing: report what several nodes have left")
    parser.add_argument(
        "--killed", type=int, default=0, help="start nothing: report what a run left that this signal ended"
    )
    parser.add_argument("--patience", type=float, default=LATE_S, help="seconds for files of other nodes to appear")
    return exit_code_of(_run_as_asked, parser.parse_args(argv))


def _run_as_asked(options: argparse.Namespace) -> int:
    if options.nodes > 1:
        wait_for_file(Path(options.request), options.patience)
    request = codec.convert(codec.read_json(options.request), Request, where=options.request)
    check(request.plan, request.model, request.workload, request.runtime)
    names = tuple(filter(None, options.names.split(",")))
    if options.killed:
        document = report_killed(request, options.request, options.out, options.killed)
    elif options.collect:
        document = collect(request, options.request, options.out, options.nodes, options.patience, names)
    elif options.nodes > 1:
        meeting = Rendezvous(
            count=options.nodes,
            endpoint=options.endpoint or _endpoint_from_environment(),
            run_id=options.meeting,
            address=options.address,
            names=names,
            join_s=options.join,
        )
        return run_node(request, options.request, options.out, options.budget, meeting)
    else:
        document = run(request, options.request, options.out, options.budget)
    return int(document["exit_code"])


def run(request: Request, request_path: str, out: Path, budget_s: float, watch: GpuMonitor | None = None) -> JsonObject:
    """Launch the ranks, write `run.json` into `out` and return it. `watch` reads the GPUs meanwhile; by default if
    there are any.
    """
    records = out / "records"
    records.mkdir(parents=True, exist_ok=True)
    for stale in (*out.glob("agents/*.*"), *records.glob("rank*"), *records.glob("flight*")):
        stale.unlink()
    ending = min(ENDING_S, 0.3 * budget_s)
    arguments = worker_arguments(request_path, records, time.time() + budget_s - ending)
    if watch is None and request.device == "cuda":
        watch = GpuMonitor()
    if watch is not None:
        watch.start()
    done = launch(
        MODULE,
        arguments,
        ranks=request.plan.gpus,
        budget_s=max(1.0, budget_s - 0.5 * ending),
        grace_s=min(GRACE_S, 0.25 * ending),
        environment=environment(request, records),
        directory=out / "logs",
    )
    samples = watch.stop() if watch is not None else []
    document = report(request, done, records, arguments, samples, watch.faults if watch is not None else ())
    write_report(document, out / "run.json")
    return document


def write_report(document: JsonObject, path: Path) -> None:
    """Write the report. Raises PlannerError with a summary of the run when it cannot be written."""
    try:
        codec.write_text(path, codec.to_json(document) + "\n")
    except BadInput as error:
        measured = document["measured"]
        step = measured["step_s"]
        took = f"{measured['steps']} steps of {step['median']:.4g} s (median)" if step else "no steps measured"
        failure = (document["failure"] or {}).get("message", "")
        raise PlannerError(
            f"{error.what}: {error.why}",
            why=f"the run is {document['status']}{f' ({failure[:200]})' if failure else ''}, {took}",
            remedy="free the disk, or write elsewhere",
        ) from error


def run_node(request: Request, request_path: str, out: Path, budget_s: float, meeting: Rendezvous) -> int:
    """Run this node's ranks and write their result; return 0 if they succeeded."""
    if request.plan.gpus % meeting.count:
        raise BadPlan(f"{request.plan.gpus} ranks do not share out evenly over {meeting.count} nodes")
    records = out / "records"
    records.mkdir(parents=True, exist_ok=True)
    node = f"{node_name()}-{os.getpid()}"
    write_agent_start(out, node)
    ending = min(ENDING_S, 0.3 * budget_s)
    ends, most_s = time.time() + budget_s, max(1.0, 0.5 * (budget_s - ending))
    apart = _apart(request, node, replace(meeting, join_s=min(meeting.join_s, most_s)))
    done = apart or name_rendezvous(
        launch(
            MODULE,
            worker_arguments(request_path, records, ends - ending),
            ranks=request.plan.gpus // meeting.count,
            budget_s=max(1.0, ends - time.time() - 0.5 * ending),
            grace_s=min(GRACE_S, 0.25 * ending),
            environment=environment(request, records, one_host=meeting.loopback),
            directory=out / "logs" / node,
            nodes=replace(meeting, join_s=most_s),
        ),
        meeting,
    )
    write_agent_result(out, node, done, met=apart is None or apart.outcome == "interrupted")
    if done.outcome == "interrupted":
        return 130
    if not done.ok:
        print(f"error: {done.failure.message if done.failure else done.outcome}", file=sys.stderr)
    return 0 if done.ok else 1


def _apart(request: Request, node: str, meeting: Rendezvous) -> LaunchResult | None:
    """Return the outcome of a run whose nodes do not meet; None if they do."""
    try:
        if not meeting.loopback and (unusable := why_no_interface(request.device)):
            return not_launched(f"the interface of {node_name()} cannot be used: {unusable}")
        why = why_no_meeting(meeting, node, meeting.join_s)
    except KeyboardInterrupt:
        return replace(not_launched(""), outcome="interrupted", failure=None)
    return not_launched(why) if why else None


def collect(
    request: Request, request_path: str, out: Path, nodes: int, patience_s: float = LATE_S, names: Sequence[str] = ()
) -> JsonObject:
    """Write `run.json` from the records of the ranks of all nodes, and return it."""
    done = combine_agent_results(out, nodes, patience_s, names)
    document = report(request, done, out / "records", worker_arguments(request_path, out / "records", 0.0))
    write_report(document, out / "run.json")
    return document


def report_killed(request: Request, request_path: str, out: Path, number: int) -> JsonObject:
    """Write `run.json` for a run whose executor was ended by a signal, from the records of its ranks; return it."""
    name = signal.Signals(number).name
    message = f"the executor was ended by {name}: nobody watched its ranks"
    failure = Failure(rank=None, exit_code=None, signal=name, message=message)
    done = replace(not_launched(message), failure=failure)
    document = report(request, done, out / "records", worker_arguments(request_path, out / "records", 0.0))
    write_report(document, out / "run.json")
    return document


def _endpoint_from_environment() -> str:
    """Return the rendezvous endpoint that Kubeflow's TrainJob sets. Raises BadPlan when it is not set."""
    host, port = os.environ.get("PET_MASTER_ADDR"), os.environ.get("PET_MASTER_PORT")
    if not host or not port:
        raise BadPlan(
            "the rendezvous endpoint of the nodes is not known",
            why="neither --endpoint nor PET_MASTER_ADDR and PET_MASTER_PORT are set",
            remedy="pass --endpoint HOST:PORT",
        )
    return f"{host}:{port}"


def worker_arguments(request_path: str, records: Path, until: float) -> list[str]:
    """Return the worker's arguments; `until` is in seconds since the epoch, so that the time for starting ranks
    counts.
    """
    return [f"--request={request_path}", f"--out={records}", f"--until={until:.3f}"]


def environment(request: Request, records: Path, *, one_host: bool = True) -> dict[str, str]:
    """Return environment variables for the ranks; NCCL's flight recorder writes to `records`."""
    added = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    # The prediction's assumptions, unless the user's own environment sets something else.
    added |= {one.name: os.environ.get(one.name, one.value) for one in assumed_environment(request.plan)}
    # The flight recorder's variables have two names, by version of torch.
    added |= dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
    added |= dict.fromkeys(("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(records / "flight"))
    if request.device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return added | loopback_environment() if one_host else added


def report(
    request: Request,
    done: LaunchResult,
    folder: Path,
    arguments: Sequence[str],
    samples: Sequence[Sample] = (),
    faults: Sequence[GpuFault] = (),
) -> JsonObject:
    """Return the report of a run from its ranks' records in `folder`; `arguments` are the ranks' command-line
    arguments.

    `samples` are states of the GPUs during the run, `faults` what their driver reported.
    """
    ranks = request.plan.gpus
    by_rank = [RankRecords.read(folder / f"rank{rank}.jsonl") for rank in range(ranks)]
    status, failure = _status(request, done, by_rank, folder)
    measured = summarise_steps(request, by_rank)
    mesh, trace = first_record(by_rank, "mesh"), _read_trace(folder / "rank0.trace.json")
    facts = first_record(by_rank, "effects")
    effects = read_back(
        request,
        None if facts is None else codec.convert(facts, ModelFacts, where="effects"),
        None if mesh is None else codec.convert(mesh, MeshFacts, where="mesh"),
        trace,
    )
    ignored = [e for e in effects if e.certain and not e.ok]
    if status == "finished" and ignored:
        status = "not_as_requested"
        failure = {
            "rank": None,
            "message": "; ".join(f"{e.what}: requested {e.requested}, took effect {e.effective}" for e in ignored),
        }
    broken = [fault.text for fault in faults if _is_ours(request, fault)]
    if broken and status in {"finished", "failed", "timeout"}:
        doubt = {"rank": None, "message": "a GPU failed while the run lasted: its numbers and times are in doubt"}
        status, failure = "failed", {**(failure or doubt), "gpus": broken}
    complete = status == "finished"
    return {
        "schema_version": 1,
        "status": status,
        "complete": complete,
        "exit_code": {"finished": 0, "out_of_memory": 4, "interrupted": 130}.get(status, 1),
        "failure": failure,
        "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": done.seconds,
        "survivors": list(done.survivors),
        "command": command(
            MODULE,
            arguments,
            ranks=ranks,
            elastic=True,
            logs=folder.parent / "logs" / "ranks",
        ),
        "device": request.device,
        "plan": codec.to_builtins(request.plan),
        "model": codec.to_builtins(request.model),
        "workload": codec.to_builtins(request.workload),
        "runtime": codec.to_builtins(request.runtime),
        "fingerprints": request.fingerprints,
        "predicted": request.predicted,
        "cluster": request.cluster,
        "notes": list(request.notes),
        "verified": first_record(by_rank, "verified"),
        "verified_types": first_record(by_rank, "verified_types"),
        "kernels": [{"kind": "kernel", **entry} for entry in by_rank[0].of("kernel")],
        "flight_records": sorted(path.name for path in folder.glob("flight*")),
        "measured": measured,
        "mesh": {"requested": rank_grid(request.plan).tolist(), "effective": mesh},
        "effects": codec.to_builtins(effects),
        "operators": operator_table(trace) if trace else [],
        "slow_ranks": slow_ranks(request.plan, _read_traces(folder, ranks)) if request.device == "cuda" else [],
        "operator_samples": [entry["sample"] for entry in by_rank[0].of("operator")],
        "gpus": codec.to_builtins(_gpu_states(request, by_rank[0], samples)),
        "missing": _missing(by_rank),
        "versions": {**versions(), **(first_record(by_rank, "versions") or {})},
    }


def _missing(by_rank: Sequence[RankRecords]) -> list[str]:
    """Return the results other than step times that the run should have recorded but did not."""
    missing: list[str] = [entry["what"] for records in by_rank for entry in records.of("missing")]
    if all("timed" in records.kinds for records in by_rank) and not all("done" in records.kinds for records in by_rank):
        missing.append("profile: a rank ended while a step was profiled")
    return missing


def _read_trace(path: Path) -> Trace | None:
    """Return the trace of rank 0's profiled step, or None when there is none that can be read."""
    try:
        text = codec.read_text(path, max_bytes=MAX_TRACE_BYTES)
        return from_kineto(codec.parse_json(text, where=str(path)))
    except PlannerError:
        return None


def _read_traces(folder: Path, ranks: int) -> dict[int, Trace]:
    """Return the traces of all ranks by rank; empty if they are too large in total or one is missing."""
    paths = [folder / f"rank{rank}.trace.json" for rank in range(ranks)]
    if ranks < 2 or not all(path.is_file() for path in paths):
        return {}
    if sum(path.stat().st_size for path in paths) > MAX_TRACE_BYTES:
        return {}
    found = {rank: _read_trace(path) for rank, path in enumerate(paths)}
    return {rank: trace for rank, trace in found.items() if trace is not None}


def _gpu_states(request: Request, records: RankRecords, samples: Sequence[Sample]) -> list[GpuSummary]:
    """Return the states of the plan's GPUs while steps were timed; of all GPUs when CUDA_VISIBLE_DEVICES is set."""
    ends = [(step.ended_at, step.seconds) for step in records.steps if step.ended_at is not None]
    if not ends or not samples:
        return []
    begin = ends[0][0] - ends[0][1]
    seen = {gpu for _, states in samples for gpu in states}
    ours = set(request.gpus) & seen if "CUDA_VISIBLE_DEVICES" not in os.environ else set()
    return summarise(samples, sorted(ours or seen), begin, ends[-1][0])


def _is_ours(request: Request, fault: GpuFault) -> bool:
    """Return whether a fault may concern the run; always True under CUDA_VISIBLE_DEVICES, which renumbers GPUs."""
    return fault.gpu is None or "CUDA_VISIBLE_DEVICES" in os.environ or not request.gpus or fault.gpu in request.gpus


def _status(
    request: Request, done: LaunchResult, by_rank: Sequence[RankRecords], folder: Path
) -> tuple[str, JsonObject | None]:
    """Return the status of the run and, if it failed, the first failure."""
    ranks = request.plan.gpus
    kinds = [records.kinds for records in by_rank]
    full = [rank for rank, kind in enumerate(kinds) if "out_of_memory" in kind]
    if full:
        memory = {rank: {"kind": "out_of_memory", **by_rank[rank].of("out_of_memory")[-1]} for rank in full}
        return "out_of_memory", {"rank": full[0], "message": "memory is full", "memory": memory}
    wrong = _wrong_numbers(by_rank)
    if wrong:
        return "wrong_numbers", {"rank": None, "message": wrong}
    if done.outcome == "interrupted":
        return "interrupted", None
    short = any("out_of_time" in kind for kind in kinds)
    # Ranks that exit slowly, or fail while a step is profiled, have still measured all steps.
    if not done.survivors and all("timed" in kind for kind in kinds):
        if short:
            return "out_of_time", {"rank": None, "message": "the budget ended before all steps were taken"}
        return "finished", None
    # In a failed run the heartbeats show which rank kept the others waiting.
    blamed = [] if done.ok else find_suspects(read_heartbeats(folder, ranks), ranks)
    if done.outcome == "timeout":
        return "timeout", {"rank": None, "message": "the budget ended", "suspects": blamed}
    if done.failure is not None:
        failure = {**codec.to_builtins(done.failure), "suspects": blamed}
        return "failed", failure
    if done.survivors:
        return "failed", {"rank": None, "message": f"processes {list(done.survivors)} could not be ended"}
    return "failed", {"rank": None, "message": "ranks ended without an error, but before they were done"}


def _wrong_numbers(by_rank: Sequence[RankRecords]) -> str:
    """Return which results were wrong, or an empty string."""
    kernels = {entry["name"] for records in by_rank for entry in records.of("kernel") if not entry["ok"]}
    if kernels:
        return f"wrong results of {', '.join(sorted(kernels))}: not timed"
    for entry in (entry for records in by_rank for entry in records.entries):
        if entry["kind"] in {"verified", "verified_types"} and not entry["ok"]:
            number = "" if entry["gradient"] is not None and entry["loss"] is not None else ", which is no number"
            return (
                f"in {entry['dtype']} the plan computes something else than one process"
                f" (worst at {entry['worst'] or 'the loss'}{number}): not timed"
            )
        if entry["kind"] == "not_finite":
            return f"the loss or the gradient of step {entry['index']} is no number: the run ended there"
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
