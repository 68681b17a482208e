"""Commands and servers in turns, some of them killed at random, and what is left of them: `soak.py MINUTES OUT.md`.

Without GPUs: runs are on gloo, calibrations on a stand-in. After every turn all processes, listening ports, shared
memory and temporary files that this program's children made must be gone; stores must still be readable. Next to the
turns one explorer is visited all the time (`visitor.py`), and its memory recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

from planner.runs.runs_store import damaged_runs, list_runs
from tests.ui.server import wait_for

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP)
TAG = "MESHWRIGHT_SOAK"
SHARED = Path("/dev/shm")  # noqa: S108 - looked at, never written
SERVERS = ("explorer", "service")
VISITED_PORT = 8699
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
        "explorer": [*planner, "ui", "--port", str(8700 + turn % 100)],
        "service": [
            *planner,
            "service",
            "--port",
            str(8800 + turn % 100),
            "--folder",
            str(folder / "service"),
            "--workers",
            "1",
        ],
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
    """Return the files of shared memory that no living process has open or mapped, without those of other users.

    A PostgreSQL server that is killed leaves two until its next start, alongside which this may run.
    """
    used = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            used |= {Path(one.path).name for one in (*process.open_files(), *process.memory_maps())}
    mine = [path for path in SHARED.iterdir() if path.stat().st_uid == os.getuid()] if SHARED.is_dir() else []
    return {path.name for path in mine if path.name not in used}


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
    wait = dice.uniform(0.5, 25.0) if name in SERVERS or dice.random() < 0.6 else 150.0
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


@contextmanager
def visited(minutes: float, scratch: Path) -> Iterator[Path]:
    """Have an explorer visited during what follows; yield the file that the visits are counted in."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(scratch / "visited")}
    counts = scratch / "visits.json"
    explorer = subprocess.Popen(
        [sys.executable, "-m", "planner", "ui", "--port", str(VISITED_PORT)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{VISITED_PORT}"
    try:
        wait_for(address, explorer)
        visitor = [
            sys.executable,
            str(ROOT / "tests" / "bench" / "visitor.py"),
            address,
            str(60 * minutes),
            str(counts),
        ]
        with (scratch / "visitor.log").open("w") as log:
            guest = subprocess.Popen(visitor, env=environment, stdout=log, stderr=log)
        yield counts
        with suppress(subprocess.TimeoutExpired):
            guest.wait(90)
        guest.kill()
    finally:
        explorer.send_signal(signal.SIGINT)
        explorer.wait(30)


def memory_line(counts: Path) -> str:
    """Return what the visits found, as a sentence."""
    if not counts.is_file():
        return "The explorer was not visited."
    found = json.loads(counts.read_text())
    memory = found["resident_mib"]
    tenth = max(1, len(memory) // 10)
    parts = [max(memory[start : start + tenth]) for start in range(0, len(memory) - tenth + 1, tenth)]
    return (
        f"Alongside it one explorer was asked {found['asked']} questions, each in a session of its own; {found['finished']} pages "
        f"ended within a minute. Server and workers held at most, in MiB, tenth by tenth: {', '.join(map(str, parts))}."
    )


def main(minutes: float, out: Path) -> None:
    dice, tag = random.Random(0), f"soak-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="soak-"))
    for name in ("tmp", "data"):
        (scratch / name).mkdir()
    with visited(minutes, scratch) as counts:
        turn, endings, remains = turns(minutes, scratch, tag, dice)
    write(minutes, out, scratch, turn, endings, remains, memory_line(counts))


def turns(
    minutes: float, scratch: Path, tag: str, dice: random.Random
) -> tuple[int, Counter[tuple[str, str]], Counter[str]]:
    """Take turns until the time is over; return how many, how they ended and the most that was left of any."""
    endings: Counter[tuple[str, str]] = Counter()
    remains: Counter[str] = Counter()
    deadline, turn, before = time.monotonic() + 60 * minutes, 0, shared()
    while time.monotonic() < deadline:
        name = dice.choice(["apply", "calibrate", *SERVERS, "suggest"])
        ending = turn_of(name, commands(scratch, turn)[name], tag, scratch, dice)
        endings[name, ending] += 1
        settled = time.monotonic() + SETTLE_S
        while ours(tag) and time.monotonic() < settled:
            time.sleep(0.5)
        found = left(tag, scratch, before)
        remains = remains | found
        names = sorted(shared() - before)
        print(f"{turn}: {name}, {ending}; left: {dict(+found) or 'nothing'} {names or ''}", flush=True)
        for process in ours(tag):
            with suppress(psutil.Error):
                process.kill()
        turn += 1
    return turn, endings, remains


def write(
    minutes: float,
    out: Path,
    scratch: Path,
    turn: int,
    endings: Counter[tuple[str, str]],
    remains: Counter[str],
    memory: str,
) -> None:
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
        memory,
        "",
        "| command | ending | times |",
        "|---|---|---:|",
        *(f"| {name} | {how} | {times} |" for (name, how), times in sorted(endings.items())),
        "",
    ]
    out.write_text("\n".join(lines), "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    main(options.minutes, options.out)
