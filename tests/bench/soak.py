"""Apply, calibrate and probe in turns, kill some of them at random, and count what is left: `soak.py MINUTES OUT.md`.

Without GPUs: runs are on gloo, calibrations on a stand-in. After every turn all processes, listening ports, shared memory
and temporary files that this program's children made must be gone; stores must still be readable.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

from planner.runs.runs_store import damaged_runs, list_runs

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP)
TAG = "MESHWRIGHT_SOAK"
SHARED = Path("/dev/shm")  # noqa: S108 - looked at, never written
SETTLE_S = 30.0  # for children to notice that their parent is gone, and to end in order


def commands(folder: Path, turn: int) -> dict[str, list[str]]:
    """Return what is run in turns, by name."""
    planner = [sys.executable, "-m", "planner"]
    return {
        "apply": [*planner, "apply", "--steps", "3", "--budget", "90s", "--out", str(folder / f"run{turn}")],
        "calibrate": [
            *planner,
            "calibrate",
            "--device",
            "cpu",
            "--budget",
            "40s",
            "--out",
            str(folder / f"{turn}.json"),
        ],
        "explorer": [*planner, "ui", "--port", str(8700 + turn % 200)],
        "suggest": [
            *planner,
            "suggest",
            "--model",
            "llama3-8b",
            "--gpus",
            "16",
            "--out",
            str(folder / f"plan{turn}.json"),
        ],
    }


def ours(tag: str) -> list[psutil.Process]:
    """Return the living processes that carry this soak's tag."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def shared() -> set[str]:
    return {path.name for path in SHARED.iterdir()} if SHARED.is_dir() else set()


def left(tag: str, scratch: Path, before: set[str]) -> Counter[str]:
    """Return what is left of the last turn."""
    processes = ours(tag)
    ports = sum(
        len([c for c in p.net_connections() if c.status == psutil.CONN_LISTEN]) for p in processes if p.is_running()
    )
    hidden = [path for path in scratch.rglob(".*") if path.is_file() and not path.name.endswith(".lock")]
    temporary = [path for path in (scratch / "tmp").iterdir() if path.name.startswith("meshwright-")]
    counts = {"processes": len(processes), "ports": ports, "shared memory": len(shared() - before)}
    return Counter(counts | {"hidden files": len(hidden), "temporary folders": len(temporary)})


def turn_of(name: str, command: list[str], tag: str, scratch: Path, dice: random.Random) -> str:
    """Run one command, perhaps killed on the way, and return how it ended."""
    environment = {**os.environ, TAG: tag, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch / "tmp")}
    environment |= {"XDG_DATA_HOME": str(scratch / "data"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=scratch,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait = dice.uniform(0.5, 25.0) if name == "explorer" or dice.random() < 0.6 else 150.0
    try:
        return f"ended with {process.wait(wait)}"
    except subprocess.TimeoutExpired:
        number = dice.choice(SIGNALS)
        target = dice.choice([process, *psutil.Process(process.pid).children(recursive=True)])
        with suppress(psutil.Error, ProcessLookupError):
            target.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SETTLE_S)
        if process.poll() is None:  # a child was hit, and its parent goes on: as it should, up to its budget
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(SETTLE_S)
        return f"{signal.Signals(number).name} to {'it' if target is process else 'a child'}"


def main(minutes: float, out: Path) -> None:
    dice, tag = random.Random(0), f"soak-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    for name in ("tmp", "data"):
        (scratch / name).mkdir()
    endings: Counter[tuple[str, str]] = Counter()
    remains: Counter[str] = Counter()
    deadline, turn, before = time.monotonic() + 60 * minutes, 0, shared()
    while time.monotonic() < deadline:
        name = dice.choice(["apply", "calibrate", "explorer", "suggest"])
        ending = turn_of(name, commands(scratch, turn)[name], tag, scratch, dice)
        endings[name, ending] += 1
        settled = time.monotonic() + SETTLE_S
        while ours(tag) and time.monotonic() < settled:
            time.sleep(0.5)
        found = left(tag, scratch, before)
        remains = remains | found
        print(f"{turn}: {name}, {ending}; left: {dict(+found) or 'nothing'}", flush=True)
        for process in ours(tag):
            with suppress(psutil.Error):
                process.kill()
        turn += 1
    os.environ["XDG_DATA_HOME"] = str(scratch / "data")
    kept, damaged = len(list_runs()), len(damaged_runs())
    how = (
        f"`python tests/bench/soak.py {minutes:g} FILE` on {datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, no GPU: {turn}"
        f" turns. Afterwards {kept} runs were in the store, {damaged} damaged. The most that was left {SETTLE_S:.0f} s after any"
        " turn's end:"
    )
    lines = [
        "# Soak: commands in turns, killed at random",
        "",
        how,
        "",
        "| what | most left |",
        "|---|---:|",
        *(
            f"| {what} | {remains[what]} |"
            for what in ("processes", "ports", "shared memory", "hidden files", "temporary folders")
        ),
        "",
        "| command | ending | times |",
        "|---|---|---:|",
        *(f"| {name} | {how} | {times} |" for (name, how), times in sorted(endings.items())),
        "",
    ]
    out.write_text("\n".join(lines), "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]))
