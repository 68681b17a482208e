"""Jobs are accepted once, held by one server at a time and ended once, in SQLite as in PostgreSQL."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.service import needs  # noqa: F401 - skips where a package is missing

from planner.service.store.database import connect  # isort: skip
from planner.service.store.jobs import DONE, Artifact, JobEnd, Jobs, KeyTaken, TooMany  # isort: skip

LEASE_S = 30.0


@pytest.fixture
def jobs(database, tmp_path):
    engine = connect(database, tmp_path)
    yield Jobs(engine)
    engine.dispose()


def submit(jobs, command="estimate", *, owner="ada", key=None, digest="d", starts=2, most_waiting=1000):
    job, _ = jobs.submit(
        owner=owner, command=command, request="{}", digest=digest, key=key, starts=starts, most_waiting=most_waiting
    )
    return job


def test_the_migrations_make_the_tables(database, tmp_path):
    """What Alembic made is what the code asks for, by Alembic's own comparison; a second start changes nothing."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from planner.service.store.tables import METADATA

    for _ in range(2):
        engine = connect(database, tmp_path)
        with engine.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})

            assert compare_metadata(context, METADATA) == []
        engine.dispose()


def test_many_servers_claim_each_job_once(jobs):
    waiting = {submit(jobs, owner=f"user{i % 3}") for i in range(60)}
    claimed = []

    def work(server):
        while (claim := jobs.claim(server, LEASE_S, without=())) is not None:
            claimed.append(claim.job)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, map(str, range(6))))
    left = []
    while (claim := jobs.claim("last", LEASE_S, without=())) is not None:
        left.append(claim.job)

    assert Counter(claimed + left) == Counter(waiting)


def test_one_key_is_one_job_however_many_ask_at_once(jobs):
    together = threading.Barrier(8)

    def ask(_):
        together.wait()
        return submit(jobs, key="the same")

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(8)))

    assert len(found) == 1
    assert len(jobs.newest("ada", 100)) == 1
    assert submit(jobs, owner="bob", key="the same") not in found
    with pytest.raises(KeyTaken):
        submit(jobs, key="the same", digest="another request")


def test_only_the_holder_ends_a_job(jobs):
    """A server that was believed dead finds its claim gone, and what it writes changes nothing."""
    job = submit(jobs)
    late = jobs.claim("late", 0.0, without=())
    time.sleep(0.05)
    assert jobs.sweep() == 1
    holder = jobs.claim("holder", LEASE_S, without=())
    assert (late.job, holder.job) == (job, job)
    assert holder.fence > late.fence

    assert jobs.end(late, JobEnd(state=DONE, exit_code=0, result='"late"')) is False
    assert jobs.renew([late, holder], LEASE_S) == {job}
    wrote = Artifact(name="run/trace.json", sha256="0" * 64, bytes=3)
    assert jobs.end(holder, JobEnd(state=DONE, exit_code=0, result='"held"', artifacts=(wrote,))) is True
    assert jobs.end(holder, JobEnd(state=DONE, exit_code=0, result='"again"')) is False
    row = jobs.read("ada", job)
    assert (row["state"], row["result"], row["artifacts"]) == (DONE, '"held"', [wrote])


@pytest.mark.parametrize(("starts", "ends_after"), [(2, 2), (1, 1)])
def test_a_job_is_started_as_often_as_it_may_and_then_fails(jobs, starts, ends_after):
    job = submit(jobs, starts=starts)
    for _ in range(ends_after):
        jobs.give_back(jobs.claim("its process dies", LEASE_S, without=()), started=True)

    assert jobs.claim("next", LEASE_S, without=()) is None
    row = jobs.read("ada", job)
    assert row["state"] == "failed"
    assert "ended before it answered" in row["error"]


def test_the_death_of_a_server_costs_a_run_its_start_and_a_question_none(jobs):
    question, run = submit(jobs, starts=1), submit(jobs, "apply", starts=1)
    for _ in range(3):
        while jobs.claim("dies", 0.0, without=()) is not None:
            pass
        time.sleep(0.05)
        jobs.sweep()

    assert jobs.read("ada", question)["state"] == "queued"
    assert jobs.read("ada", run)["state"] == "failed"


def test_folders_of_questions_that_nobody_works_on_are_known(jobs):
    names = {command: submit(jobs, command) for command in ("estimate", "suggest", "apply")}
    busy = jobs.claim("busy", LEASE_S, without=()).job
    jobs.cancel("ada", names["apply"])

    assert jobs.left([*names.values(), "unknown"]) == {names["estimate"], names["suggest"]} - {busy}


def test_a_start_that_others_ended_does_not_count_but_not_for_ever(jobs, monkeypatch):
    monkeypatch.setattr("planner.service.store.jobs.MOST_STARTS", 5)
    job = submit(jobs, starts=1)
    ended = 0
    while (claim := jobs.claim("is killed", LEASE_S, without=())) is not None:
        jobs.give_back(claim, started=False)
        ended += 1

    assert ended == 5
    assert jobs.read("ada", job)["state"] == "failed"


def test_renewed_leases_do_not_run_out(jobs):
    submit(jobs)
    claim = jobs.claim("busy", 0.0, without=())
    time.sleep(0.05)

    assert jobs.renew([claim], LEASE_S) == set()
    assert jobs.sweep() == 0


def test_a_cancelled_job_is_neither_started_nor_ended(jobs):
    waiting, running = submit(jobs), submit(jobs)
    claim = jobs.claim("busy", LEASE_S, without=())
    running, waiting = claim.job, ({waiting, running} - {claim.job}).pop()
    jobs.cancel("eve", running)
    assert jobs.read("ada", running)["state"] == "running"
    for job in (waiting, running):
        jobs.cancel("ada", job)

    assert jobs.claim("next", LEASE_S, without=()) is None
    assert jobs.end(claim, JobEnd(state=DONE, exit_code=0, result="1")) is False
    assert jobs.renew([claim], LEASE_S) == {running}
    assert {jobs.read("ada", job)["state"] for job in (waiting, running)} == {"cancelled"}


def test_users_take_turns_and_see_their_own_jobs(jobs):
    first = [submit(jobs, owner="many") for _ in range(3)]
    (alone,) = [submit(jobs, owner="one")]

    claims = [jobs.claim("busy", LEASE_S, without=()).job for _ in range(2)]

    assert claims == [first[0], alone]
    assert jobs.read("one", first[0]) is None
    with pytest.raises(TooMany):
        submit(jobs, owner="many", most_waiting=2)


def test_jobs_of_one_moment_are_claimed_in_order(jobs):
    asked = [submit(jobs) for _ in range(20)]

    assert [jobs.claim("busy", LEASE_S, without=()).job for _ in range(20)] == asked


def test_a_user_has_a_share_and_short_questions_a_place_of_their_own(jobs):
    for _ in range(3):
        submit(jobs, "suggest", owner="many")
    short, other = submit(jobs, owner="many"), submit(jobs, "suggest", owner="one")
    claimed = [jobs.claim("busy", LEASE_S, without=(), most_running=2) for _ in range(4)]

    # Two of one's jobs at most, the other's in between.
    assert [claim and claim.owner for claim in claimed] == ["many", "one", "many", None]
    assert claimed[1].job == other
    assert jobs.claim("busy", LEASE_S, without=(), only=("estimate",)).job == short


def test_runs_wait_for_each_other(jobs):
    submit(jobs, "apply")
    question = submit(jobs, "suggest")

    assert jobs.claim("busy", LEASE_S, without={"apply", "tune"}).job == question


def test_ended_jobs_are_forgotten(jobs):
    ended, waiting = submit(jobs), submit(jobs)
    claim = jobs.claim("busy", LEASE_S, without=())
    jobs.end(claim, JobEnd(state=DONE, artifacts=(Artifact(name="a", sha256="0" * 64, bytes=1),)))
    ended, waiting = claim.job, ({ended, waiting} - {claim.job}).pop()

    assert jobs.forget(3600.0) == 0
    time.sleep(0.05)
    assert jobs.forget(0.0) == 1
    assert jobs.read("ada", ended) is None
    assert jobs.read("ada", waiting) is not None
