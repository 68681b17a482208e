"""The service over HTTP: jobs are submitted, followed, read and cancelled."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from planner.io.version import version
from planner.remote.settings import LOOPBACK, Settings
from planner.service.documents import Accepted, JobDocument, JobList
from planner.service.guard import Known, Rates, SameSite, Tokens, WholeBodies
from planner.service.queue import Queue
from planner.service.requests import request_type
from planner.service.store.jobs import ENDED, KeyTaken, TooMany
from topology import codec
from topology.errors import BadInput, PlannerError, UserError

MAX_BODY_BYTES = 40 << 20  # a file has at most 32 MiB, and JSON escapes some of it
ELSEWHERE_S = 1.0  # seconds between two checks whether another server has changed jobs that are followed here
MAX_WAIT_S = 30.0


class Service:
    """State shared by the routes."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.queue = Queue(settings)
        self.jobs, self.files, self.dispatcher = self.queue.jobs, self.queue.files, self.queue.dispatcher
        self.tokens = Tokens(settings.users)
        self.rates = Rates(settings.rate_per_s)
        self._waiting: dict[str, set[asyncio.Event]] = {}  # by job: those who follow it

    def user(self, authorization: str | None) -> str:
        """Return the user who asks. Raises HTTPException (401)."""
        user = self.tokens.user(authorization)
        if user is None:  # the token was taken away since `Known` let the request in
            raise HTTPException(401)
        return user

    def submit(self, user: str, command: str, request: BaseModel, key: str | None) -> str:
        """Accept a request as a job and return its id. Raises HTTPException."""
        if (wait := self.rates.wait_s(user)) > 0:
            raise HTTPException(429, "too many requests", {"Retry-After": str(int(wait) + 1)})
        try:
            return self.queue.submit(user, command, request, key=key)
        except UserError as error:
            raise HTTPException(422, str(error)) from error
        except KeyTaken as error:
            raise HTTPException(409, str(error)) from error
        except TooMany as error:
            raise HTTPException(429, str(error), {"Retry-After": "10"}) from error
        except PlannerError as error:
            raise HTTPException(503, str(error), {"Retry-After": "30"}) from error

    def read(self, user: str, job: str) -> JobDocument:
        """Return a job of a user. Raises HTTPException (404)."""
        found = self.queue.read(user, job)
        if found is None:
            raise HTTPException(404, "there is no such job")
        return found

    async def changes(self, user: str, job: str) -> AsyncIterator[JobDocument]:
        """Yield a job's document at each change, until it has ended."""
        news = asyncio.Event()
        self._waiting.setdefault(job, set()).add(news)
        try:
            last: JobDocument | None = None
            while last is None or last.state not in ENDED:
                news.clear()
                found = await run_in_threadpool(self.read, user, job)
                if found != last:
                    last = found
                    yield found
                if found.state not in ENDED:
                    await news.wait()
        finally:
            self._waiting[job].discard(news)
            if not self._waiting[job]:
                del self._waiting[job]

    def _wake(self, job: str) -> None:
        for news in self._waiting.get(job, ()):
            news.set()

    async def listen(self) -> None:
        """Notify those who follow a job: at news from the dispatcher, which is in a thread of its own, and when another
        server has changed the job in the database.
        """
        loop = asyncio.get_running_loop()

        def tell(job: str) -> None:
            loop.call_soon_threadsafe(self._wake, job)

        self.dispatcher.on_news = tell
        known: dict[str, tuple[str, str]] = {}
        while True:
            await asyncio.sleep(ELSEWHERE_S)
            with suppress(SQLAlchemyError):
                seen = await run_in_threadpool(self.jobs.states, list(self._waiting)) if self._waiting else {}
                for job in [job for job in seen if seen[job] != known.get(job)]:
                    self._wake(job)
                known = seen


def create_app(settings: Settings) -> FastAPI:
    """Return the service as an ASGI application. Raises PlannerError when its database or folder cannot be used."""
    service = Service(settings)

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncIterator[None]:
        listening = asyncio.create_task(service.listen())
        service.dispatcher.start()
        yield
        listening.cancel()
        await run_in_threadpool(service.dispatcher.stop)

    about = "Plans multi-GPU training: the commands of `planner` as jobs. Flags are those of the command line."
    app = FastAPI(
        title="meshwright",
        version=version(),
        description=about,
        lifespan=running,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
    )
    app.router.route_class = _JsonRoute
    app.add_middleware(WholeBodies, most_bytes=MAX_BODY_BYTES)
    app.add_middleware(Known, tokens=service.tokens)
    app.add_middleware(SameSite, hosts=LOOPBACK | {settings.host, *settings.allowed_hosts})
    app.add_exception_handler(SQLAlchemyError, _database_away)
    _add_health(app, service)
    _add_commands(app, service)
    _add_jobs(app, service)
    return app


class _JsonRequest(Request):
    """Bodies are strict JSON: no NaN, no number out of range, no half of a surrogate pair."""

    async def json(self) -> object:
        try:
            return codec.parse_json((await self.body()).decode(), where="the body")
        except UnicodeDecodeError as error:
            raise HTTPException(422, f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
        except BadInput as error:
            raise HTTPException(422, f"{error.what}: {error.why}") from error


class _JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return read


async def _database_away(_request: Request, _error: Exception) -> Response:
    about = {"detail": "the database does not answer; ask again, with an Idempotency-Key"}
    return JSONResponse(about, status_code=503, headers={"Retry-After": "2"})


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", summary="Whether the service can take work.")
    def healthz() -> Response:
        why = service.queue.ready()
        return JSONResponse({"status": why or "ok", "version": version()}, status_code=503 if why else 200)


def _add_commands(app: FastAPI, service: Service) -> None:
    for command, flags in service.queue.flags.items():
        _add_command(app, service, command, request_type(command, flags))


def _add_command(app: FastAPI, service: Service, command: str, kind: type[BaseModel]) -> None:
    def submit(
        request: BaseModel,
        response: Response,
        authorization: Annotated[str | None, Header()] = None,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    ) -> Accepted:
        user = service.user(authorization)
        job = service.submit(user, command, request, idempotency_key)
        response.headers["Location"] = f"/v1/jobs/{job}"
        return Accepted(job=job, url=f"/v1/jobs/{job}", events=f"/v1/jobs/{job}/events")

    submit.__annotations__["request"] = kind
    submit.__name__ = command
    app.post(f"/v1/{command}", status_code=202, summary=str(kind.__doc__), tags=["commands"])(submit)


def _add_jobs(app: FastAPI, service: Service) -> None:
    def who(authorization: Annotated[str | None, Header()] = None) -> str:
        return service.user(authorization)

    User = Annotated[str, Depends(who)]  # noqa: N806 - a type

    @app.get("/v1/jobs", summary="The newest jobs, without their results.", tags=["jobs"])
    def jobs(user: User, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> JobList:
        return JobList.of(service.jobs.newest(user, limit))

    @app.get("/v1/jobs/{job}", summary="A job, with its result once it has ended.", tags=["jobs"])
    async def job(job: str, user: User, wait: Annotated[float, Query(ge=0, le=MAX_WAIT_S)] = 0.0) -> JobDocument:
        found = await run_in_threadpool(service.read, user, job)
        if wait == 0 or found.state in ENDED:
            return found
        try:
            async with asyncio.timeout(wait):
                async for found in service.changes(user, job):  # noqa: B007 - the last one is the answer
                    pass
        except TimeoutError:
            pass
        return found

    @app.delete("/v1/jobs/{job}", summary="Cancel a job; one that has ended stays as it is.", tags=["jobs"])
    def cancel(job: str, user: User) -> JobDocument:
        service.read(user, job)
        service.queue.cancel(user, job)
        return service.read(user, job)

    def of_user(job: str, user: User) -> str:
        service.read(user, job)  # 404 before the stream begins
        return user

    @app.get("/v1/jobs/{job}/events", response_class=EventSourceResponse, tags=["jobs"])
    async def events(job: str, user: Annotated[str, Depends(of_user)]) -> AsyncIterator[ServerSentEvent]:
        """A job's document at each change, as server-sent events named by its state; ends when the job has."""
        async for found in service.changes(user, job):
            yield ServerSentEvent(data=found, event=found.state)

    @app.get("/v1/jobs/{job}/state", summary="What a tuning or a run has written so far.", tags=["jobs"])
    def state(job: str, user: User) -> Response:
        service.read(user, job)
        return Response(service.queue.state_so_far(user, job), media_type="application/octet-stream")

    @app.get("/v1/jobs/{job}/artifacts/{name:path}", summary="A file that a job wrote.", tags=["jobs"])
    def artifact(job: str, name: str, user: User) -> FileResponse:
        for one in service.read(user, job).artifacts:
            if one.name == name and service.files.path(one.sha256).is_file():
                path = service.files.path(one.sha256)
                kind = "application/octet-stream"  # never shown as a page of this site
                return FileResponse(path, media_type=kind, filename=Path(name).name)
        raise HTTPException(404, "there is no such file")
