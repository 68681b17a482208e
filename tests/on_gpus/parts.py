"""The parts of the command besides plans: each starts what a person would start, within a time, and reads what it
left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.on_gpus.rows import FAILED, NO_TIME, NOT_RUN, OK, Row, compared

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["--model", "llama3.2-1b", "--seq-len", "2048"]
TAIL = 300  # characters of what a command said last
# Of the largest number, in bfloat16. The most that was seen is 0.07: gradients of biases that softmax all but cancels
# (examples/sharding/gpus.md).
SHARDED_OFF = 0.15
Tell = Callable[[Row], None]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a part works: its folder, how many GPUs there are, and its seconds: all that it may take (`whole`), or
    what the budget has left of them.
    """

    out: Path
    gpus: int
    limit_s: float
    whole: bool = True
    text: Path | None = None  # torchtitan's tokenizer/ and c4_test/

    @property
    def ranks(self) -> int:
        return min(2, self.gpus)


def started(place: Place, name: str, words: Sequence[str | Path], limit_s: float) -> tuple[int | None, str, float]:
    """Run a command in the part's folder; return its exit code (None: it was ended), what it printed, and its
    seconds.
    """
    place.out.mkdir(parents=True, exist_ok=True)
    log, began = place.out / f"{name}.log", time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(word) for word in words], cwd=place.out, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=limit_s)
        for kind in (signal.SIGTERM, signal.SIGKILL):  # and what it has left running
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, kind)
                process.wait(timeout=5)
    return code, log.read_text(errors="replace"), time.monotonic() - began


def planner(place: Place, name: str, *words: str | Path, limit_s: float) -> tuple[int | None, str, float]:
    """Run a command of the planner."""
    return started(place, name, [sys.executable, "-m", "planner", *words], limit_s)


def row(
    place: Place, part: str, what: str, code: int | None, text: str, seconds: float, said: str = "", fine: bool = True
) -> Row:
    """Return the row of a command: OK where it ended with 0 and what it left is `fine`, NO_TIME where the budget
    ended it.
    """
    if code is None and not place.whole:
        return Row(part=part, what=what, result=NO_TIME, said="the budget ended first", seconds=seconds)
    result = OK if code == 0 and fine else FAILED
    if result == FAILED:
        said = f"{'ended after its time' if code is None else f'exit code {code}'}; {said or text.strip()[-TAIL:]}"
    return Row(part=part, what=what, result=result, said=said, seconds=seconds)


# --- the command line -------------------------------------------------------------------------------------------------


def commands(place: Place, tell: Tell) -> None:
    """`estimate`, `apply`, `report` and the export that runs as it stands, one after the other as a person types
    them.
    """
    overlapped = ["--tp", "2", "--sequence-parallel", "--tp-overlap", "fused"] if place.gpus > 1 else []
    words = [*MODEL, "--framework=meshwright", "--cluster=local", f"--gpus={place.ranks}"]
    words += ["--global-batch=4", "--micro-batch=4", *overlapped, "--out=plan.json", "--force"]
    code, text, seconds = planner(place, "estimate", "estimate", *words, limit_s=60)
    tell(row(place, "commands", "planner estimate", code, text, seconds))
    if code:
        return
    code, text, seconds = planner(
        place, "apply", "apply", "plan.json", "--out=run", "--force", "--steps=5", "--allow-busy", limit_s=120
    )
    lines = "; ".join(line for line in text.splitlines() if re.match(r"(status|numbers|step) ", line))
    # 4 is a step outside its range, of which this part does not judge.
    tell(row(place, "commands", "planner apply", 0 if code == 4 else code, text, seconds, lines))
    code, text, seconds = planner(place, "report", "report", "run", "--html=run.html", "--force", limit_s=60)
    tell(row(place, "commands", "planner report", 0 if code == 4 else code, text, seconds, fine="step" in text))
    code, text, seconds = planner(
        place, "export", "export", "plan.json", "--to=torchrun", "--out=run.sh", "--force", limit_s=60
    )
    if code == 0:
        code, text, seconds = started(place, "torchrun", [*_with_tools(place), "sh", "run.sh"], 120)
    tell(row(place, "commands", "planner export --to torchrun, run as it stands", code, text, seconds))
    if place.gpus > 1:
        nodes(place, tell)


def nodes(place: Place, tell: Tell) -> None:
    """Two nodes as a person starts them, here on one machine with a GPU each: they meet, and the plan saves memory."""
    gpu = next((word for word in ("H100", "H200") if word in _gpu_name()), "H200")
    words = [*MODEL, "--framework=meshwright", f"--cluster=2x1x{gpu}", "--dp-shard=2", "--global-batch=4"]
    words += ["--micro-batch=2", "--saver=chunked_loss,optimizer_in_backward", "--out=nodes.json", "--force"]
    code, text, seconds = planner(place, "nodes-estimate", "estimate", *words, limit_s=60)
    if code == 0:
        with socket.socket() as asked:
            asked.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{asked.getsockname()[1]}"
        job = ["--launcher=torchrun", f"--endpoint={endpoint}", "--out=nodes", "--force", "--steps=5", "--budget=100s"]
        code, text, seconds = planner(place, "nodes-written", "apply", "nodes.json", *job, limit_s=60)
    if code == 0:
        both = "export CUDA_VISIBLE_DEVICES=1; sh nodes/node.sh & export CUDA_VISIBLE_DEVICES=0; sh nodes/node.sh"
        code, text, seconds = started(place, "nodes-run", [*_with_tools(place), "sh", "-c", f"{both} && wait $!"], 110)
    if code == 0:
        collect = ["-m", "executor.run.apply", f"--request={place.out}/nodes/request.json", f"--out={place.out}/nodes"]
        code, text, _ = started(place, "nodes-end", [sys.executable, *collect, "--nodes=2", "--collect"], 60)
    report = place.out / "nodes" / "run.json"
    found = json.loads(report.read_text()) if code == 0 and report.is_file() else {}
    said = f"{found['status']}; step {(found['measured']['step_s'] or {}).get('median')} s" if found else ""
    fine = found.get("status") == "finished" and found.get("complete") is True
    tell(row(place, "commands", "planner apply --launcher torchrun, two nodes", code, text, seconds, said, fine=fine))


def _with_tools(place: Place) -> list[str]:
    """Return the words before a command that finds this Python and its torchrun by their usual names."""
    tools = place.out / "tools"
    tools.mkdir(exist_ok=True)
    for name, words in {"torchrun": "-m torch.distributed.run", "python3": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tools / name).chmod(0o755)
    return ["env", f"PATH={tools}:{os.environ['PATH']}"]


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def tune(place: Place, tell: Tell) -> None:
    """A question small enough for its time; no trial may compute wrong numbers or fail."""
    words = [*MODEL, f"--gpus={place.gpus}", "--global-batch=8", "--budget", f"{place.limit_s - 30:.0f}s", "--steps=5"]
    code, text, seconds = planner(place, "tune", "tune", *words, "--json", "--allow-busy", limit_s=place.limit_s)
    found = _json_in(text)
    trials = found.get("trials", [])
    bad = [trial for trial in trials if trial["status"] in {"wrong_numbers", "failed", "timeout"}]
    best = (found.get("best") or {}).get("measured_s")
    said = f"{len(trials)} trials, best {best:.4g} s, {found['stop']['reason']}" if best else text.strip()[-TAIL:]
    said += "".join(f"; {trial['status']}: {trial['cause']}" for trial in bad)
    tell(
        row(place, "tune", f"llama3.2-1b on {place.gpus} GPUs", code, text, seconds, said, fine=bool(best) and not bad)
    )


def calibrate(place: Place, tell: Tell) -> None:
    """What decides a question, measured into a profile, and the question asked again with it."""
    words = [*MODEL, "--framework=meshwright", f"--gpus={place.gpus}", "--global-batch=8", "--no-store", "--allow-busy"]
    budget = f"{place.limit_s - 30:.0f}s"
    code, text, seconds = planner(
        place, "calibrate", "calibrate", *words, "--out=profile.json", "--budget", budget, limit_s=place.limit_s
    )
    profile = place.out / "profile.json"
    found = json.loads(profile.read_text()) if profile.is_file() else {}
    counts = [f"{len(found.get(kind, ()))} {kind}" for kind in ("layers", "operators", "collectives", "overlap")]
    tell(
        row(
            place,
            "calibrate",
            f"llama3.2-1b on {place.gpus} GPUs",
            code,
            text,
            seconds,
            ", ".join(counts),
            fine=bool(found),
        )
    )


# --- what has a script of its own -------------------------------------------------------------------------------------


def serving(place: Place, tell: Tell) -> None:
    """The executor serving, on one GPU and two: steps and loads alongside their prediction."""
    from topology import codec
    from topology.probe.from_machine import probe_machine

    place.out.mkdir(parents=True, exist_ok=True)
    codec.write_text(place.out / "machine.json", codec.to_json(probe_machine()) + "\n")
    ranks = ",".join(str(count) for count in (1, 2) if count <= place.gpus)
    words = [sys.executable, ROOT / "tests/bench/serve_on_gpus.py", place.out, "--model=llama3.2-1b"]
    words += [f"--ranks={ranks}", "--cluster", place.out / "machine.json", f"--budget={place.limit_s - 10:.0f}"]
    code, text, seconds = started(place, "serve", words, place.limit_s)
    for count in ranks.split(","):
        path = place.out / f"tp{count}" / "serve.json"
        found = json.loads(path.read_text()) if path.is_file() else {"status": "nothing was served"}
        checks = [check["ok"] for check in found.get("checks", ())]
        said = f"{found['status']}; {len(checks)} checks, {len(found.get('steps', ()))} steps, "
        said += f"{sum(load['complete'] for load in found.get('loads', ()))} loads answered"
        answered = any(load["complete"] for load in found.get("loads", ()))
        fine = found["status"] == "finished" and bool(checks) and all(checks) and answered
        if not answered and not place.whole and all(checks):
            code = None  # its own time limit, which is the rest of the budget, came before the loads
        ended = row(place, "serving", f"llama3.2-1b on {count} GPUs", code, text, seconds, said, fine=fine)
        tell(ended)


def sharded(place: Place, tell: Tell) -> None:
    """Captured modules, placed by the planner, against one GPU."""
    if place.gpus < 2:
        tell(Row(part="sharded modules", what="all", result=NOT_RUN, said="needs two GPUs"))
        return
    words = [sys.executable, ROOT / "tests/bench/shard_on_gpus.py", place.out, f"--ranks={place.ranks}"]
    code, text, seconds = started(place, "shard", [*words, f"--seconds={place.limit_s - 10:.0f}"], place.limit_s)
    lines = place.out / "rows.jsonl"
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    for one in found:
        tell(sharded_row(one))
    if not found or code is None:
        tell(row(place, "sharded modules", "the rest" if found else "all", code, text, seconds, fine=False))


def sharded_row(one: Mapping[str, Any]) -> Row:
    """Return the row of a module: FAILED where its largest difference is no rounding of half precision."""
    off = one.get("error_of_largest", 0.0)
    said = one.get("failed") or one.get("skipped") or f"off by {off:.1e} of the largest number"
    wrong = "failed" in one or not off <= SHARDED_OFF
    result = FAILED if wrong else NOT_RUN if "skipped" in one else OK
    return Row(part="sharded modules", what=one["what"], result=result, said=said[:TAIL], seconds=one["seconds"])


def faults(place: Place, tell: Tell) -> None:
    """Faults made for real on two GPUs."""
    if place.gpus < 2:
        tell(Row(part="faults", what="ranks stopped, slow, full", result=NOT_RUN, said="needs two GPUs"))
        return
    words = [sys.executable, ROOT / "tests/bench/record_gpu_faults.py", place.out]
    code, text, seconds = started(place, "faults", words, place.limit_s)
    tell(row(place, "faults", "ranks stopped, slow, full: examples/validation/faults_2xH200.md", code, text, seconds))


def exports(place: Place, tell: Tell) -> None:
    """Exports that other frameworks run as they stand."""
    missing = [name for name in ("torchtitan", "deepspeed", "pydantic") if importlib.util.find_spec(name) is None]
    if missing or place.text is None:
        why = "needs torchtitan and deepspeed installed, and --text"
        tell(Row(part="exports", what="torchtitan, DeepSpeed", result=NOT_RUN, said=why))
        return
    words = [sys.executable, ROOT / "tests/bench/exports_on_gpus.py", "all", place.out, place.out / "page.md"]
    words += [
        f"--gpus={4 if place.gpus > 3 else place.ranks}",
        "--text",
        place.text,
        f"--budget={place.limit_s - 30:.0f}",
    ]
    code, text, seconds = started(place, "exports", words, place.limit_s)
    lines = place.out / "rows.jsonl"
    found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    for one in found:
        result = {"ok": OK, "not run": NO_TIME}.get(one["status"], FAILED)
        seconds, measured = one.get("seconds", 0.0), (one.get("measured") or {}).get("step_s")
        step = compared(one["predicted"]["datasheet"]["step_s"], measured) if measured else ""
        tell(Row(part="exports", what=f"{one['id']}, {one['target']}", result=result, step=step, seconds=seconds))
    if not found or code is None:
        tell(row(place, "exports", "the rest" if found else "all", code, text, seconds, fine=False))


# --- tests ------------------------------------------------------------------------------------------------------------

OVERLAP_TESTS = "tests/executor/test_overlap_on_gpus.py"


def overlap(place: Place, tell: Tell) -> None:
    """Every overlap mode at odd shapes and in every type, thousands of times, and sums in captured graphs."""
    _tests(place, "overlap", [ROOT / OVERLAP_TESTS], tell)


def marked(place: Place, tell: Tell) -> None:
    """The other tests that need GPUs."""
    _tests(place, "tests", [ROOT / "tests/executor", f"--ignore={ROOT / OVERLAP_TESTS}"], tell)


def _tests(place: Place, part: str, where: Sequence[str | Path], tell: Tell) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-m", "gpu or multigpu", "-p", "no:cacheprovider", "--rootdir", ROOT]
    words += ["-c", ROOT / "pyproject.toml", *where]
    code, text, seconds = started(place, part, words, place.limit_s)
    ends = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", text, re.MULTILINE)
    failed = re.findall(r"^FAILED (\S+)", text, re.MULTILINE)
    said = "; ".join([*ends[-1:], *(name.rpartition("::")[2] for name in failed)])
    tell(row(place, part, 'pytest -m "gpu or multigpu"', code, text, seconds, said))


def _json_in(text: str) -> dict[str, Any]:
    """Return the document that a command printed after its progress."""
    begin = text.find("\n{")
    try:
        found = json.JSONDecoder().raw_decode(text[begin + 1 :] if begin >= 0 else text)[0]
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
