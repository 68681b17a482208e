"""The service over HTTP, as processes: it answers as the command line does, and every accepted job ends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.service import needs  # noqa: F401 - skips where a package is missing
from tests.service.postgres import binaries
from tests.waiting import wait_until
from topology.errors import UserError

import httpx  # isort: skip
from planner.remote.client import Client, ServiceError  # isort: skip
from tests.service.running import ROOT, service  # isort: skip

ESTIMATE = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "tp": 2, "global_batch": 64, "micro_batch": 1}
SHORT = {"model": "tiny-llama", "cluster": "h200x4", "gpus": "2", "pp": "1", "global_batch": 8}
ADA = {"Authorization": "Bearer ada has a long token"}
SECONDS = {"model": "llama3.2-1b", "cluster": "dgx-h100", "gpus": "2", "seq_len": 4096, "global_batch": 16}
LONG = {"model": "deepseek-v3", "cluster": "dgx-h100", "gpus": "65536", "framework": "megatron-lm"}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    with service(tmp_path_factory.mktemp("service")) as running, Client(running.url) as client:
        yield running, client


def planner(*words, cwd=ROOT):
    command = [sys.executable, "-m", "planner", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=100, check=False)


def test_a_job_has_the_document_that_the_command_prints(local):
    _, client = local
    words = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--tp",
        "2",
        "--global-batch",
        "64",
        "--micro-batch",
        "1",
        "--json",
    ]

    assert client.result(client.submit("estimate", ESTIMATE)) == json.loads(planner("estimate", *words).stdout)


def test_planner_asks_a_service_as_it_asks_itself(local, tmp_path):
    """The same text, files sent and fetched, the same exit codes and errors."""
    running, _ = local
    flags = ["--model", "tiny-llama", "--cluster", "cluster.json", "--gpus", "2", "--pp", "1", "--global-batch", "8"]
    (tmp_path / "cluster.json").write_text(json.dumps({"gpu": "h200-sxm", "gpus_per_node": 4, "nodes": 1}))
    here = planner("suggest", *flags, "--out", "here.json", cwd=tmp_path)
    there = planner("--server", running.url, "suggest", *flags, "--out", "there.json", cwd=tmp_path)

    assert there.returncode == here.returncode == 0, there.stderr
    plans = [json.loads((tmp_path / name).read_text()) for name in ("here.json", "there.json")]
    assert plans[0]["plan"] == plans[1]["plan"]
    texts = [re.sub(r"\d+\.\d s;|t?here.json", "", one.stdout) for one in (here, there)]
    assert texts[0] == texts[1]
    refused = planner("--server", running.url, "suggest", "--model", "nope")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[0] == "error: no model called 'nope'"


def test_the_description_names_every_command_and_flag(local):
    running, _ = local
    found = httpx.get(f"{running.url}/openapi.json").json()

    assert {"/healthz", "/v1/suggest", "/v1/estimate", "/v1/apply", "/v1/jobs/{job}"} <= set(found["paths"])
    assert {"model", "cluster", "gpus", "seq_len", "compile"} <= set(
        found["components"]["schemas"]["EstimateRequest"]["properties"]
    )


def test_a_job_is_accepted_followed_and_ended(local):
    running, client = local
    accepted = httpx.post(f"{running.url}/v1/suggest", json=SHORT)

    assert accepted.status_code == 202
    job = accepted.json()["job"]
    states = [document["state"] for document in client.events(job)]
    assert states[-1] == "done"
    assert set(states) <= {"queued", "running", "done"}
    assert client.job(job)["result"]["plans"]
    assert job in {one["job"] for one in httpx.get(f"{running.url}/v1/jobs").json()["jobs"]}


def test_one_idempotency_key_is_one_job(local):
    _, client = local
    first = client.submit("estimate", ESTIMATE, key="once")

    assert client.submit("estimate", ESTIMATE, key="once") == first
    with pytest.raises(ServiceError, match="409"):
        client.submit("estimate", {**ESTIMATE, "tp": 4}, key="once")


def test_what_a_job_wrote_can_be_fetched(local, tmp_path):
    _, client = local
    document = client.wait(client.submit("trace", {**ESTIMATE, "out": "step.json"}))
    (wrote,) = document["artifacts"]
    client.download(wrote, tmp_path / "step.json")

    assert wrote["name"] == "step.json"
    assert hashlib.sha256((tmp_path / "step.json").read_bytes()).hexdigest() == wrote["sha256"]
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]


def test_errors_of_commands_arrive_as_such(local):
    _, client = local
    with pytest.raises(UserError, match="no model called 'nope'"):
        client.result(client.submit("estimate", {"model": "nope"}))


def begun(client, job):
    wait_until(lambda: client.job(job)["progress"] not in {"", "starting"}, 100)


def test_cancelling_ends_the_process_at_once(local):
    running, client = local
    job = client.submit("suggest", LONG)
    begun(client, job)
    before = running.workers()

    assert client.cancel(job)["state"] == "cancelled"
    wait_until(lambda: any(not one.is_running() for one in before))
    assert client.wait(job)["state"] == "cancelled"


def test_a_short_question_does_not_wait_for_long_ones(local):
    """However many long searches there are, they have not ended when it has."""
    _, client = local
    long = [client.submit("suggest", {**LONG, "global_batch": 4096 * n}) for n in range(1, 7)]
    assert client.result(client.submit("estimate", ESTIMATE))["legal"] is True

    assert not {client.cancel(job)["state"] for job in long} & {"done", "failed"}


def test_requests_by_other_names_and_from_other_sites_are_refused(local):
    running, _ = local

    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Host": "127.0.0.1.evil.example"}):
        assert httpx.get(f"{running.url}/healthz", headers=headers).status_code == 403
    assert httpx.get(f"{running.url}/healthz", headers={"Origin": running.url}).status_code == 200


@pytest.mark.parametrize(
    "body", ['{"gpus": 1e999}', '{"global_batch": Infinity}', '{"model": {"layers": NaN}}', '{"model": "\\ud800"}', "{"]
)
def test_a_body_that_is_not_json_is_refused_and_the_connection_stays(local, body):
    running, _ = local
    with httpx.Client(base_url=running.url) as client:
        assert client.post("/v1/suggest", content=body, headers={"Content-Type": "application/json"}).status_code == 422
        assert client.get("/healthz").status_code == 200


def test_what_is_no_job_has_no_events_and_no_key_is_empty(local):
    running, _ = local

    assert httpx.get(f"{running.url}/v1/jobs/none/events").status_code == 404
    empty = httpx.post(f"{running.url}/v1/estimate", json=ESTIMATE, headers={"Idempotency-Key": ""})
    assert empty.status_code == 422


def test_whoever_asks_starts_no_program_unless_it_was_allowed(local, tmp_path):
    _, client = local
    tuning = {"model": "tiny-llama", "metric": "jsonl"}
    for command in ("touch made", "/bin/sh -c 'touch made'", "'", ""):
        with pytest.raises(ServiceError, match="422"):
            client.submit("tune", {**tuning, "command": command})
    with service(tmp_path, programs=("torchrun",)) as allowing, Client(allowing.url) as client:
        with pytest.raises(ServiceError, match="422"):
            client.submit("tune", {**tuning, "command": "sh torchrun"})
        assert client.cancel(client.submit("tune", {**tuning, "command": "torchrun train.py {config}"}))


def test_requests_that_stop_coming_are_ended(local):
    """A head without its end, and a body shorter than was said; what is whole is answered meanwhile."""
    running, _ = local
    head = b"POST /v1/estimate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    started = [head, head + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{", b""]
    sockets = [socket.create_connection(("127.0.0.1", running.settings.port)) for _ in started]
    for one, text in zip(sockets, started, strict=True):
        one.sendall(text)
    assert httpx.get(f"{running.url}/healthz").status_code == 200
    for one in sockets:
        one.settimeout(60)
        with one, one.makefile("rb") as answer:
            assert answer.readline().partition(b" ")[2] in {b"", b"408 Request Timeout\r\n"}
            answer.read()  # ends: the connection is closed


def test_a_port_that_is_taken_is_refused(local):
    running, _ = local
    found = planner("service", f"--port={running.settings.port}", f"--folder={running.settings.folder}")

    assert found.returncode == 2
    assert "do: planner service --port" in found.stderr


def test_bodies_are_bounded(local):
    running, _ = local
    chunks = (b"x" * (1 << 20) for _ in range(41))

    for content in (chunks, b"x" * (41 << 20)):  # of a length that is not said before, and of one that is
        answer = httpx.post(f"{running.url}/v1/estimate", content=content)
        assert (answer.status_code, answer.json()) == (413, {"detail": "a request has at most 40 MiB"})


def test_with_tokens_users_see_their_own_jobs_and_wait_at_their_rate(tmp_path):
    users = {name: hashlib.sha256(f"{name} has a long token".encode()).hexdigest() for name in ("ada", "bob")}
    with service(tmp_path, users=users, rate_per_s=1.0) as running:
        assert httpx.post(f"{running.url}/v1/estimate", json=ESTIMATE).status_code == 401
        assert httpx.post(f"{running.url}/v1/estimate", content=b"{").status_code == 401  # before the body is read
        with Client(running.url, token="ada has a long token", patience_s=0) as ada:  # noqa: S106 - a test's own
            job = ada.submit("estimate", ESTIMATE)
            assert ada.wait(job)["state"] == "done"
            with ThreadPoolExecutor(8) as at_once:
                asked = [
                    at_once.submit(httpx.post, f"{running.url}/v1/estimate", json=ESTIMATE, headers=ADA)
                    for _ in range(8)
                ]
            assert 429 in {one.result().status_code for one in asked}
            time.sleep(1.5)
            with pytest.raises(ServiceError, match="422"):
                ada.submit("estimate", {"case": "/etc/passwd"})
        bob = {"Authorization": "Bearer bob has a long token"}
        assert httpx.get(f"{running.url}/v1/jobs/{job}", headers=ADA).status_code == 200
        assert httpx.get(f"{running.url}/v1/jobs/{job}", headers=bob).status_code == 404


@pytest.mark.parametrize("database", ["sqlite" if binaries() is None else "postgresql"], indirect=True)
def test_jobs_survive_the_death_of_the_server(database, tmp_path):
    """The server is killed with a job running and one waiting; each ends once, and the worker went with it.

    Either database is enough: test_store.py asks both what a job's row goes through.
    """
    with service(tmp_path, database=database, workers=1) as running, Client(running.url) as client:
        jobs = [client.submit("suggest", {**SHORT, "global_batch": 8 * n}) for n in (1, 2)]
        workers = running.workers()
        running.kill()
        assert psutil.wait_procs(workers, timeout=20)[1] == []
        running.start()

        for n, job in enumerate(jobs, 1):
            assert client.result(job)["question"]["workload"]["global_batch_size"] == 8 * n
            assert client.job(job)["starts"] <= 2


def test_a_database_that_goes_away_comes_back(postgres, tmp_path):
    with service(tmp_path, database=postgres.url) as running, Client(running.url) as client:
        job = client.submit("suggest", SECONDS)
        begun(client, job)
        postgres.stop()
        assert httpx.get(f"{running.url}/healthz", timeout=30).status_code == 503
        assert httpx.post(f"{running.url}/v1/estimate", json=ESTIMATE, timeout=30).status_code == 503
        postgres.start()

        assert client.result(client.submit("estimate", ESTIMATE))["legal"] is True
        assert client.result(job)["plans"]
