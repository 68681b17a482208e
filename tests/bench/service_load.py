"""Many clients ask a service for minutes, while its processes are killed: is each job answered, rightly, and once?

    python tests/bench/service_load.py --clients 200 --seconds 600 > load.md
    python tests/bench/service_load.py --clients 20 --kill server --times 50 --postgres
    python tests/bench/service_load.py --clients 200 --seconds 180 --heavy 6

Each client asks for estimates, one in ten for a search, waits for the answer, and asks again. An answer is right when
it is about the batch that was asked for. Killed are worker processes, the server (which is then started again), or the
database (stopped and started). With `--heavy`, two other users have asked for so many searches on 16,384 GPUs before,
clients, who are one user, ask for estimates only, and a further user asks for one estimate after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import random
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from planner.remote.client import Client
from tests.service.postgres import Server, binaries
from tests.service.running import Process, service
from topology.errors import PlannerError
from topology.units import in_gib

# A small model, so that the service is measured and not the simulation.
ESTIMATES = [{"model": "tiny-llama", "cluster": "h200x4", "gpus": gpus} for gpus in (1, 2, 4)]
SEARCH = {"model": "tiny-llama", "cluster": "h200x4", "gpus": 2}
HEAVY = {"model": "llama3-405b", "gpus": 16384, "framework": "megatron-lm"}
PATIENCE_S = 1800.0  # longer than any kill lasts: whose job was accepted has its answer
CLIENTS, OTHERS, ALONE = "clients", ("ada", "bob"), "eve"
USERS = {user: hashlib.sha256(f"{user} has a long token".encode()).hexdigest() for user in (CLIENTS, *OTHERS, ALONE)}


@dataclass
class Count:
    """What the clients saw."""

    states: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    wrong: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    enough: threading.Event = field(default_factory=threading.Event)  # nothing more is asked


def asking(url: str, user: str) -> Client:
    return Client(url, token=f"{user} has a long token", patience_s=PATIENCE_S)


def client(url: str, until: float, seed: int, seen: Count, searches: float, user: str = CLIENTS) -> None:
    """Ask until the time is over or enough was killed, and wait for every answer. `searches` is their share."""
    draw = random.Random(seed)
    time.sleep(draw.random() * 2)
    with asking(url, user) as asked:
        while time.monotonic() < until and not seen.enough.is_set():
            batch = 4 * draw.randint(1, 16)
            command, flags = ("suggest", SEARCH) if draw.random() < searches else ("estimate", draw.choice(ESTIMATES))
            began = time.monotonic()
            try:
                job = asked.submit(command, {**flags, "global_batch": batch})
                document = asked.wait(job)
            except PlannerError as error:
                with seen.lock:
                    seen.refused[error.what] += 1
                continue
            with seen.lock:
                seen.jobs.append(job)
                seen.states[document["state"]] += 1
                seen.seconds.append(time.monotonic() - began)
                seen.wrong += not right(document, flags["gpus"], batch)
                if document["error"]:
                    seen.errors[document["error"]["message"]] += 1


def right(document: dict[str, Any], gpus: int, batch: int) -> bool:
    """Return whether an answer is about the batch that was asked for; a stated failure is no wrong answer."""
    if document["state"] != "done":
        return document["error"] is not None
    result = document["result"]
    if document["command"] == "suggest":
        return bool(result["question"]["workload"]["global_batch_size"] == batch)
    tokens = result["estimate"]["tokens_per_s_per_gpu"] * result["estimate"]["step_s"]["value"]
    return bool(abs(tokens * gpus / result["workload"]["seq_len"] - batch) < 0.01 * batch)


def disturb(what: str, times: int, running: Process, database: Server | None, until: float) -> int:
    """Kill something again and again until the time is over; return how often."""
    done = 0
    draw = random.Random(0)
    while done < times and time.monotonic() < until:
        time.sleep(0.2 + draw.random())
        if what == "worker":
            workers = running.workers()
            with suppress(psutil.Error, IndexError):
                draw.choice(workers).kill()
                done += 1
        elif what == "server":
            running.kill()
            running.start()
            done += 1
        elif database is not None:
            database.stop()
            time.sleep(draw.random())
            database.start()
            done += 1
    return done


def main() -> None:
    """Run the bench and print a table."""
    reported = argparse.ArgumentParser(description=__doc__)
    reported.add_argument("--clients", type=int, default=200)
    reported.add_argument("--seconds", type=float, default=600)
    reported.add_argument("--kill", choices=["worker", "server", "database"])
    reported.add_argument("--times", type=int, default=50)
    reported.add_argument("--postgres", action="store_true")
    reported.add_argument("--heavy", type=int, default=0)
    said = reported.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mw-load-")))
        folder.chmod(0o755)
        database = None
        if said.postgres:
            found = binaries()
            assert found is not None, "no PostgreSQL server is installed"
            database = Server(folder=folder / "pg", bin=found)
            database.make()
            database.start()
            stack.callback(database.stop, "immediate")
        url = database.url if database else None
        settings = {"database": url, "workers": 2, "lease_s": 5.0, "rate_per_s": 1e6, "users": USERS}
        running = stack.enter_context(service(folder / "service", **settings))
        others = [stack.enter_context(asking(running.url, user)) for user in OTHERS]
        for number in range(said.heavy):
            others[number % 2].submit("suggest", {**HEAVY, "global_batch": 2048 + 512 * number})
        seen, until = Count(), time.monotonic() + said.seconds
        began = time.monotonic()
        threads = [
            threading.Thread(target=client, args=(running.url, until, seed, seen, 0.0 if said.heavy else 0.1))
            for seed in range(said.clients)
        ]
        alone = Count()
        if said.heavy:
            threads.append(threading.Thread(target=client, args=(running.url, until, -1, alone, 0.0, ALONE)))
        for thread in threads:
            thread.start()
        time.sleep(min(20.0, said.seconds / 3))
        before = psutil.Process(running.process.pid).memory_info().rss
        killed = disturb(said.kill, said.times, running, database, until) if said.kill else 0
        if said.kill:
            seen.enough.set()
        for thread in threads:
            thread.join()
        after = psutil.Process(running.process.pid).memory_info().rss
        show(said, seen, killed, time.monotonic() - began, running)
        print(f"memory of the server: {in_gib(before, 2)} after the first seconds, {in_gib(after, 2)} at the end")
        if said.heavy:
            states = Counter(job["state"] for other in others for job in other.jobs(limit=said.heavy))
            print(f"heavy searches of {len(OTHERS)} users at the end: {dict(states)}")
            print(f"one more user, one estimate after the other: {dict(alone.states)}, {ranks(alone.seconds)}")


def ranks(seconds: list[float]) -> str:
    """Return the median and the times that 5 and 1 of 100 exceed."""
    at = sorted(seconds)
    return ", ".join(f"p{q} {at[min(len(at) - 1, len(at) * q // 100)]:.2f} s" for q in (50, 95, 99) if at)


def show(said: argparse.Namespace, seen: Count, killed: int, seconds: float, running: Process) -> None:
    """Print what was seen, and what the database says of the same jobs."""
    from sqlalchemy import create_engine, func, select

    from planner.service.store.tables import JOBS

    url = running.settings.database_url.replace("postgresql:", "postgresql+psycopg:")
    ours = JOBS.c.owner == CLIENTS
    with create_engine(url).connect() as connection:
        rows = dict(connection.execute(select(JOBS.c.state, func.count()).where(ours).group_by(JOBS.c.state)).all())
        most = connection.execute(select(func.max(JOBS.c.fence)).where(ours)).scalar_one()
        keys = connection.execute(select(func.count(JOBS.c.idempotency_key.distinct())).where(ours)).scalar_one()
    accepted = sum(rows.values())
    what = f"{said.kill} killed {killed} times" if said.kill else "nothing killed"
    what += f", next to {said.heavy} heavy searches of two users" if said.heavy else ""
    print(
        f"| {said.clients} clients, {seconds:.0f} s, {'PostgreSQL' if said.postgres else 'SQLite'}, {what} | {accepted} "
        f"| {rows.get('done', 0)} | {rows.get('failed', 0)} | {accepted - rows.get('done', 0) - rows.get('failed', 0)} "
        f"| {accepted - keys + len(seen.jobs) - len(set(seen.jobs))} | {seen.wrong} | {most} "
        f"| {ranks(seen.seconds)} |"
    )
    print(
        f"\nrefused {dict(seen.refused)}, failures {dict(seen.errors)}; load average {os.getloadavg()[0]:.1f}, {platform.node()}"
    )


if __name__ == "__main__":
    main()
