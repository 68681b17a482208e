"""The explorer as a client of a service elsewhere: the answer is that of a search here, and faults are said."""

from __future__ import annotations

import json

import pytest

from tests.ui import needs  # noqa: F401 - skips where a package is missing
from tests.ui.conftest import metrics, said

for _name in ("fastapi", "sqlalchemy", "alembic", "httpx"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: pip install 'meshwright[service]'")

from planner.explain.documents import search_document  # noqa: E402 - after the packages that are needed
from planner.question.flags import Flags  # noqa: E402
from planner.remote.client import ServiceError  # noqa: E402
from planner.remote.settings import SERVER  # noqa: E402
from planner.search.answer import answer  # noqa: E402
from planner.search.search import SearchOptions  # noqa: E402
from tests.service.running import free_port  # noqa: E402
from tests.service.running import service as running_service  # noqa: E402
from tests.waiting import wait_until  # noqa: E402
from topology import codec  # noqa: E402
from topology.errors import BadInput  # noqa: E402
from ui.background import remote, service  # noqa: E402


@pytest.fixture
def asks(monkeypatch):
    """Return a function that makes the explorer of this process a client of a service."""

    def ask(url):
        monkeypatch.setenv(SERVER, url)
        service.client.clear()
        service.jobs.clear()

    yield ask
    service.client.clear()
    service.jobs.clear()


@pytest.mark.parametrize(
    ("flags", "framework", "options"),
    [
        (
            Flags(model="llama3.2-1b", cluster="h200x4", seq_len=4096, global_batch=8),
            "torchtitan",
            SearchOptions(top=4),
        ),
        (
            Flags(model="llama3-8b", cluster="dgx-h100", gpus=(8, 16), seq_len=4096, global_batch=32),
            "megatron-lm",
            SearchOptions(top=1, gpu_price_per_hour=2.0),
        ),
    ],
)
def test_a_result_read_from_a_service_is_the_one_that_it_had(flags, framework, options):
    here = answer(flags, framework, options)
    document = json.loads(codec.to_json(search_document(here)))
    there = remote.read_search(document, flags, framework)

    assert there.plans == here.plans
    assert (there.search, there.rejected, there.assumed, there.likely) == (
        here.search,
        here.rejected,
        here.assumed,
        here.likely,
    )
    assert there.by_gpus == here.by_gpus
    assert (there.question.workload, there.question.runtime, there.question.gpus) == (
        here.question.workload,
        here.question.runtime,
        here.plans[0].plan.gpus,
    )


@pytest.mark.parametrize(
    ("damage", "error"), [({"schema_version": 99}, ServiceError), ({"plans": [{"rank": "one"}]}, BadInput)]
)
def test_what_a_service_answers_is_checked(damage, error):
    flags = Flags(model="llama3.2-1b", cluster="h200x4", seq_len=4096, global_batch=8)
    document = json.loads(codec.to_json(search_document(answer(flags, "torchtitan", SearchOptions(top=1)))))

    with pytest.raises(error):
        remote.read_search({**document, **damage}, flags, "torchtitan")


def test_pages_ask_the_service_with_its_token(explorer, asks, tmp_path, monkeypatch):
    import hashlib

    alone = metrics(explorer("plans", model="llama3.2-1b", cluster="h200x4"))
    users = {"ann": hashlib.sha256(b"secret").hexdigest()}
    with running_service(tmp_path / "service", users=users) as there:
        asks(there.url)
        monkeypatch.setenv("MESHWRIGHT_TOKEN", "secret")
        test = explorer("plans", model="llama3.2-1b", cluster="h200x4", batch="12")
        wait_until(
            lambda: [(job["command"], job["state"]) for job in service.jobs().jobs(limit=10)] == [("suggest", "done")],
            90,
        )
        shown = metrics(test.run())  # where the answer came after the page
        assert shown["Best step"].endswith("s")
        assert shown.keys() == alone.keys()
        assert service.read("0" * 32) is None

        asks(there.url)
        monkeypatch.setenv("MESHWRIGHT_TOKEN", "another")
        assert "a token is needed" in said(explorer("plans", model="llama3.2-1b", cluster="h200x4", batch="16"))


def test_a_service_that_is_away_is_said_to_be(explorer, asks, monkeypatch):
    monkeypatch.setattr(service, "PATIENCE_S", 0.1)
    asks(f"http://127.0.0.1:{free_port()}")

    assert "does not answer" in said(explorer("plans", model="llama3.2-1b", cluster="h200x4", batch="20"))
