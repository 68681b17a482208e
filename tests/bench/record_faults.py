"""What a person sees when a run goes wrong: each fault made for real on CPU processes, and recorded.

Run as `python3 tests/bench/record_faults.py > examples/validation/faults.md` where torch is installed; with a word, only
those faults whose names hold it. Ranks are killed
and stopped by their process ids; nothing else is touched. For each fault: what was done, what `planner apply` printed,
its exit code, and which processes of the run were left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = f"MESHWRIGHT_FAULTS_{uuid.uuid4().hex}"
STEPS = ("--steps", "1000")
WAIT_S = 240.0
LARGEST_BYTES = 2500


def start(out: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `planner apply` of the built-in run: a tiny model on two gloo processes."""
    return subprocess.Popen(
        [sys.executable, "-m", "planner", "apply", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, MARK: "1", "XDG_DATA_HOME": str(out.parent / "data"), **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def rank_in(out: Path, rank: int, phase: str) -> int:
    """Return a rank's pid as soon as it is in a phase."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            beat = json.loads((out / "records" / f"rank{rank}.beat").read_text())
        except (OSError, ValueError):
            beat = {"phase": ""}
        if "pid" in beat and beat["phase"].startswith(phase):
            return int(beat["pid"])
        time.sleep(0.02)
    raise SystemExit(f"rank {rank} never came to {phase!r}")


def left() -> list[int]:
    """Return processes of our runs that still live."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            ours = MARK.encode() in (folder / "environ").read_bytes()
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if ours and state not in {"Z", "X"}:
            found.append(int(folder.name))
    return found


def killed(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS)
    os.kill(rank_in(out, 1, "step 5"), signal.SIGKILL)
    return process


def stopped(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS, "--budget", "120s")
    os.kill(rank_in(out, 1, "step 5"), signal.SIGSTOP)
    return process


def stopped_at_start(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS, "--budget", "120s")
    os.kill(rank_in(out, 1, ""), signal.SIGSTOP)
    return process


def full_memory(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS)
    resource.prlimit(rank_in(out, 1, "step 2"), resource.RLIMIT_AS, (1 << 20, 1 << 20))
    return process


def full_disk(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LARGEST_BYTES, LARGEST_BYTES))
    return process


def read_only(out: Path) -> subprocess.Popen[str]:
    return start(Path("/proc/self/run"), *STEPS)


def no_home(out: Path) -> subprocess.Popen[str]:
    return start(out, "--steps", "2", HOME="/nonexistent", XDG_DATA_HOME="/proc/nowhere")


def ctrl_c(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS)
    rank_in(out, 0, "step 5")
    process.send_signal(signal.SIGINT)
    return process


def terminated(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS)
    rank_in(out, 0, "step 5")
    process.send_signal(signal.SIGTERM)
    return process


def planner_killed(out: Path) -> subprocess.Popen[str]:
    process = start(out, *STEPS)
    rank_in(out, 0, "step 5")
    process.kill()
    time.sleep(15)  # nobody waits for the rest to end but us
    return process


def busy_port(out: Path) -> subprocess.Popen[str]:
    taken = socket.socket()
    taken.bind(("127.0.0.1", 29500))
    taken.listen()
    return start(out, "--steps", "2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def out_of_time(out: Path) -> subprocess.Popen[str]:
    return start(out, *STEPS, "--budget", "100s")


FAULTS: dict[str, tuple[str, Callable[[Path], subprocess.Popen[str]]]] = {
    "memory is full (34)": ("rank 1's address space is limited while it takes steps; on a GPU the allocator says it", full_memory),
    "a rank never joins (35)": ("SIGSTOP to rank 1 before it has joined the others", stopped_at_start),
    "a collective hangs (36)": ("SIGSTOP to rank 1 in step 5", stopped),
    "a rank dies (37)": ("SIGKILL to rank 1 in step 5", killed),
    "the planner is killed (38)": ("SIGKILL to `planner apply` in step 5; the kernel tells its children", planner_killed),
    "Ctrl-C (39)": ("SIGINT to `planner apply` in step 5", ctrl_c),
    "a scheduler ends it (39)": ("SIGTERM to `planner apply` in step 5", terminated),
    "the port is busy (40)": ("port 29500 is taken and MASTER_PORT names it", busy_port),
    "the disk is full (41)": ("no file may grow beyond 2.5 kB", full_disk),
    "the directory cannot be written (41)": ("--out in /proc", read_only),
    "no home (41)": ("HOME and the data folder do not exist", no_home),
    "the budget ends (55)": ("1000 steps asked for, 100 s given", out_of_time),
}  # fmt: skip


def main(wanted: str) -> None:
    print(
        "# Faults, made for real and recorded\n\n"
        f"By `python3 tests/bench/record_faults.py` on {datetime.now(UTC).date()}, {platform.system()}, torch"
        f" {version('torch')}, two gloo processes of the built-in run. Numbers in brackets: our list of faults. Other faults"
        " of that list are refused before anything starts (`tests/planner/test_apply.py`: another machine or fewer GPUs, 54)"
        " or found in what is read back (`tests/executor/test_measuring.py`: requested against took effect, 44).\n"
    )
    for name, (what, make) in FAULTS.items():
        if wanted not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            out = Path(folder) / "run"
            process = make(out)
            said, _ = process.communicate(timeout=WAIT_S)
            time.sleep(0.5)
            survivors = left()
            for pid in survivors:
                os.kill(pid, signal.SIGKILL)
        said = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", said).replace(folder, "DIR").strip()
        print(f"## {name}\n\n{what[0].upper()}{what[1:]}. Exit code {process.returncode}, processes left:"
              f" {len(survivors)}.\n\n```\n{said}\n```\n", flush=True)  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="?", default="", help="only faults whose names have this in them")
    options = parser.parse_args()
    main(options.wanted)
