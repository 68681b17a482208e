"""Start the ranks of one machine as forks of a process that has imported their modules, and end them together.

`python -m executor.launch.forked_agent RANKS FOLDER MODULE ARGUMENT...` does on one machine what torchrun does on
several: ranks get the same variables, meet at a store of this process and write errors to the same files, and the first
failing rank ends the others. It is faster, since each rank of torchrun imports torch again. Failures are printed in
torchrun's format. Ranks are forked before this process has threads or uses a GPU.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from executor.launch.guard import PR_SET_PDEATHSIG

GRACE_S = 30.0  # seconds from SIGTERM to SIGKILL, as in torchrun
TOGETHER_S = 0.1  # ranks that fail within it are all named: one may be the cause for the other
POLL_S = 0.02
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(argv: Sequence[str]) -> int:
    """Run the ranks; return 0 if all succeeded, else 1. A signal ends them, and then this process."""
    count, folder, module, arguments = int(argv[0]), Path(argv[1]), argv[2], list(argv[3:])
    # Queries the driver without creating a context, which no fork could use; threads as set by torchrun.
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - torch reads its environment

    if module.startswith("executor."):
        import_module(module)
    signals: list[int] = []
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: signals.append(number))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        running = _fork_ranks(count, folder, module, arguments, listening)
        _store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    failed = _wait(running, signals)
    if signals:
        signal.signal(signals[0], signal.SIG_DFL)
        os.kill(os.getpid(), signals[0])
    if failed:
        print(_summary(failed), file=sys.stderr, flush=True)
    return int(bool(failed))


def _fork_ranks(
    count: int, folder: Path, module: str, arguments: Sequence[str], listening: socket.socket
) -> dict[int, int]:
    """Start the ranks, which join the store that is `listening`; return {process id: rank}."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1])}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    running, parent = {}, os.getpid()
    for rank in range(count):
        error = folder / str(rank) / "error.json"
        error.parent.mkdir(parents=True, exist_ok=True)
        error.unlink(missing_ok=True)
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error)}
        pid = os.fork()
        if pid == 0:
            listening.close()
            _be_rank(module, arguments, variables, parent)
        running[pid] = rank
    return running


def _be_rank(module: str, arguments: Sequence[str], variables: dict[str, str], parent: int) -> None:
    """Run as a rank, and exit without shutting down the interpreter, since torch's threads can outlive it. Does not
    return.
    """
    code = 1
    try:
        os.setsid()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.getppid() == parent:  # otherwise the parent died before this request
            os.environ |= variables
            sys.argv = [module, *arguments]
            sys.modules.pop(module, None)  # is run again as the program; its imports are cached
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
    except SystemExit as asked:
        code = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:  # noqa: BLE001 - said as the interpreter says it
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _wait(running: dict[int, int], signals: Sequence[int]) -> list[tuple[datetime, int, int, int]]:
    """Wait for all ranks; return (time, rank, exit code, pid) of failed ones in order of time.

    After the first failure, or a signal to this process, the others are ended.
    """
    failed: list[tuple[datetime, int, int, int]] = []
    end_at, kill_at = None, None
    while running:
        while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            if (code := os.waitstatus_to_exitcode(status)) and not signals:
                failed.append((datetime.now(UTC), running[pid], code, pid))
            del running[pid]
        now = time.monotonic()
        if end_at is None and (failed or signals):
            end_at = now + (0.0 if signals else TOGETHER_S)
        if end_at is not None and kill_at is None and now >= end_at:
            kill_at = now + GRACE_S
            _signal(running, signal.SIGTERM)
        if kill_at is not None and now >= kill_at:
            _signal(running, signal.SIGKILL)
        if running:
            time.sleep(POLL_S)
    return failed


def _signal(running: dict[int, int], number: int) -> None:
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _summary(failed: Sequence[tuple[datetime, int, int, int]]) -> str:
    """Return the failures in torchrun's format, the first one as the root cause."""
    blocks = [
        f"  time      : {at:%Y-%m-%d_%H:%M:%S}\n  host      : here\n  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {pid})"
        for at, rank, code, pid in failed
    ]
    return "\n".join(["Failures:", *blocks[1:], "Root Cause (first observed failure):", blocks[0]])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
