"""What a page shows while a job runs (`planner.jobs`): progress and a stop button, and the last answer below, dimmed.

Results are kept for all sessions, so that a link that was computed once opens at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import streamlit as st
from streamlit import runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from planner.jobs.processes import Job, Stopped, Workers
from ui.background.shared_jobs import PendingAnswer, SharedJobs
from ui.question import state

MAX_RESULTS = {
    "search": 64,
    "fastest": 64,
    "numbers": 16,
    "check": 16,
    "other": 16,
    "simulate": 8,
    "sizes": 32,
    "serve": 32,
    "pareto": 16,
}  # search results take kilobytes, a long trace tens of megabytes
PATIENCE_S = 0.8  # seconds before the panel appears, so that fast results do not flicker
GLANCE_S = 0.05  # seconds between two checks for an early answer
SERVER = "server"  # the session of requests that this server makes before any user does


@st.cache_resource(show_spinner=False)
def workers() -> Workers:
    """Return the processes that all sessions share."""
    return Workers("ui.background.work")


@st.cache_resource(show_spinner=False)
def _finished() -> dict[tuple[str, str], Any]:
    """Return the results of all sessions, by kind and key. They are frozen, so that sessions can share them."""
    return {}


@st.cache_resource(show_spinner=False)
def _shared() -> SharedJobs:
    """Return the running jobs of all sessions."""

    def is_open(session: str) -> bool:
        return session == SERVER or not runtime.exists() or runtime.get_instance().is_active_session(session)

    return SharedJobs(is_open)


def _session() -> str:
    """Return the name of the session whose page this is."""
    context = get_script_run_ctx()
    return "" if context is None else context.session_id


def ask(
    kind: str,
    key: str,
    *arguments: Any,
    title: str,
    start: Callable[[], PendingAnswer] | None = None,
    patience_s: float | None = None,
) -> Any:
    """Return the result of a job, or None after showing its progress. Raises the job's errors.

    `start` starts the job elsewhere than in a process of this machine; the page waits for it for PATIENCE_S, or
    `patience_s`. Sessions that request the same result share a job. A session waits for one job of each kind: a request
    with another key leaves the earlier job.
    """
    finished = _finished()
    if (kind, key) in finished:
        return finished[kind, key]
    kept: dict[str, PendingAnswer] = state.results().setdefault(kind, {})
    if st.session_state.get(f"_stopped_{kind}") == key:
        _stopped(kind, title)
        return None
    job = kept.get(key)
    if job is None or isinstance(job.error, Stopped):
        for other in kept:
            _shared().leave(_session(), kind, other)
        kept.clear()
        begin = start or partial(Job, workers(), kind, *arguments)
        job = kept[key] = _shared().join(_session(), kind, key, begin)
    to_the_end_s = st.session_state.get("_patience_s")  # tests of pages do not wait for early answers
    if to_the_end_s is None:
        ended = _answers(job, PATIENCE_S if patience_s is None else patience_s)
    else:
        ended = job.ask(to_the_end_s)
    if not ended:
        _panel(kind, key, job, title, seen=job.early)
        return None
    _keep(kind, key, job)
    if job.error is not None:
        raise job.error
    return job.result


def finished(kind: str, key: str) -> Any:
    """Return a cached result; None if there is none."""
    return _finished().get((kind, key))


def prepare(kind: str, key: str, *arguments: Any) -> None:
    """Compute the result that the first session will request; a session that comes earlier joins the job."""
    job = _shared().join(SERVER, kind, key, partial(Job, workers(), kind, *arguments))
    while not job.ask(1.0):
        pass
    _keep(kind, key, job)


def _answers(job: PendingAnswer, patience_s: float) -> bool:
    """Return whether a job is done, after waiting for that, or for an early answer, `patience_s` at most."""
    ends = time.monotonic() + patience_s
    while not job.ask(max(0.0, min(GLANCE_S, ends - time.monotonic()))):
        if job.early is not None or time.monotonic() >= ends:
            return False
    return True


def early(kind: str, key: str) -> Any:
    """Return the early answer of a running job of this session; None if there is none."""
    job = state.results().get(kind, {}).get(key)
    return None if job is None else job.early


def _keep(kind: str, key: str, job: PendingAnswer) -> None:
    """Cache the result of a job for all sessions; of each kind only the newest MAX_RESULTS."""
    _shared().ended(kind, key)
    if job.error is not None:
        return
    finished = _finished()
    same_kind = [pair for pair in list(finished) if pair[0] == kind]
    for old in same_kind[: max(0, len(same_kind) + 1 - MAX_RESULTS[kind])]:
        finished.pop(old, None)
    finished[kind, key] = job.result


@st.fragment(run_every=0.25)
def _panel(kind: str, key: str, job: PendingAnswer, title: str, *, seen: Any) -> None:
    """Show the progress of a job. Only this fragment of the page runs again until the job is done, or answers early.

    `seen` is the early answer that the page shows already.
    """
    if job.ask(0) or job.early is not seen:
        st.rerun()
    with st.container(border=True):
        left, right = st.columns([5, 1], vertical_alignment="center")
        with left:
            st.markdown(f":material/hourglass_top: **{title}** · {time.monotonic() - job.started:.0f} s")
            st.caption(job.line or "starting")
        if right.button("Stop", key=f"stop_{kind}", icon=":material/stop_circle:", width="stretch"):
            _shared().leave(_session(), kind, key)
            st.session_state[f"_stopped_{kind}"] = key
            st.rerun()


def _stopped(kind: str, title: str) -> None:
    with st.container(border=True):
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.markdown(f":material/stop_circle: **{title}**: stopped. Change the question, or start it again.")
        if right.button("Start again", key=f"again_{kind}", width="stretch"):
            st.session_state.pop(f"_stopped_{kind}", None)
            state.results().pop(kind, None)
            st.rerun()
