"""A client of a service (`planner service`), by httpx:

with Client("http://127.0.0.1:8600") as service:
    job = service.submit("suggest", {"model": "llama3-8b", "cluster": "dgx-h100"})
    print(service.result(job)["plans"][0])
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from planner.remote.errors import ENDED, ServiceError, error_of
from topology import codec
from topology.codec import JsonObject
from topology.errors import UserError

TOKEN = "MESHWRIGHT_TOKEN"  # noqa: S105 - the name of the variable that holds it
WAIT_S = 5.0  # seconds of a request that waits for a job: short, since the wait is lost if the server dies
TIMEOUT_S = 60.0
PATIENCE_S = 120.0  # seconds for which an unreachable service is retried; it may be restarting
RETRY_S = 0.5
AWAY = frozenset({429, 502, 503, 504})


class Client:
    """Asks one service. `token` defaults to the variable MESHWRIGHT_TOKEN.

    Requests that a service did not answer are sent again for `patience_s`; each job is accepted only once, since it has
    an Idempotency-Key. Methods raise ServiceError when the service refuses or stays away.
    """

    def __init__(self, url: str, *, token: str | None = None, patience_s: float = PATIENCE_S) -> None:
        given = token or os.environ.get(TOKEN)
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        self._patience_s = patience_s
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise UserError(f"{url!r} is not the address of a service", remedy="http://127.0.0.1:8600") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._http.close()

    def submit(self, command: str, flags: JsonObject, *, key: str | None = None) -> str:
        """Ask for a job and return its id. `flags` are those of the command, with underscores and without dashes."""
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return str(self._ask("POST", f"/v1/{command}", json=flags, headers=headers).json()["job"])

    def job(self, job: str, *, wait_s: float = 0.0) -> JsonObject:
        """Return a job's document, after waiting at most `wait_s` (30 at most) for it to end."""
        document: JsonObject = self._ask("GET", f"/v1/jobs/{job}", params={"wait": wait_s}).json()
        return document

    def wait(self, job: str) -> JsonObject:
        """Return a job's document once it has ended."""
        while (document := self.job(job, wait_s=WAIT_S))["state"] not in ENDED:
            pass
        return document

    def result(self, job: str) -> Any:
        """Return a job's result once it has ended. Raises UserError, Infeasible or PlannerError if it failed."""
        document = self.wait(job)
        if document["state"] != "done":
            raise error_of(document)
        return document["result"]

    def events(self, job: str) -> Iterator[JsonObject]:
        """Yield a job's document at each change, until it has ended."""
        with self._http.stream("GET", f"/v1/jobs/{job}/events") as answer:
            if answer.is_error:
                answer.read()
                raise _refusal(answer)
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield codec.parse_json(line.removeprefix("data: "), where="events")

    def cancel(self, job: str) -> JsonObject:
        """Cancel a job, and return its document."""
        document: JsonObject = self._ask("DELETE", f"/v1/jobs/{job}").json()
        return document

    def jobs(self, *, limit: int = 100) -> list[JsonObject]:
        """Return the newest jobs, without their results."""
        found: list[JsonObject] = self._ask("GET", "/v1/jobs", params={"limit": limit}).json()["jobs"]
        return found

    def content(self, artifact: Mapping[str, object]) -> bytes:
        """Return a file that a job wrote (an entry of `artifacts`)."""
        return self._ask("GET", str(artifact["url"])).content

    def so_far(self, job: str) -> bytes:
        """Return the state that a running job has written; empty if none."""
        return self._ask("GET", f"/v1/jobs/{job}/state").content

    def download(self, artifact: Mapping[str, object], path: Path) -> None:
        """Write a job's file to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.content(artifact))

    def _ask(self, method: str, url: str, **options: Any) -> httpx.Response:
        """Return the answer to a request; one that was not answered is sent again. Raises ServiceError."""
        ends = time.monotonic() + self._patience_s
        while True:
            try:
                answer = self._http.request(method, url, **options)
            except httpx.TransportError as error:
                if time.monotonic() > ends:
                    raise ServiceError(
                        f"the service {self._http.base_url} does not answer", why=str(error), remedy="planner service"
                    ) from error
            else:
                if not answer.is_error:
                    return answer
                if answer.status_code not in AWAY or time.monotonic() > ends:
                    raise _refusal(answer)
            time.sleep(RETRY_S)


def _refusal(answer: httpx.Response) -> ServiceError:
    try:
        content = answer.json()
    except ValueError:
        content = {}
    detail = content.get("detail") or content.get("error", {}).get("message") or answer.reason_phrase
    if isinstance(detail, list):  # for a request that does not fit the command's flags
        detail = "; ".join(f"{'.'.join(map(str, one['loc'][1:2]))}: {one['msg']}" for one in detail[:8])
    refused = ServiceError(f"the service refused ({answer.status_code})", why=str(detail))
    refused.status = answer.status_code
    refused.exit_code = 2 if answer.status_code == 422 else 1
    return refused
