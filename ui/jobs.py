"""Long work in background threads: it reports progress, can be stopped, and its result is kept.

A page asks for the result of a key. The first request starts a thread and waits a moment, so that fast results appear
without a flicker; then a panel shows progress and a stop button until the result is there. Work stops at its next
progress report, which searches and simulations make many times a second. Finished results are shared between sessions,
so that a link that was computed once opens immediately.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import streamlit as st

from topology.errors import PlannerError
from ui import state

Progress = Callable[[str], None]
MAX_RESULTS = {"search": 64, "timeline": 2}  # kept for all sessions; search results are small, a large trace has 50 MB
PATIENCE_S = 0.8  # before the panel replaces the page


class Stopped(PlannerError):
    """The user pressed stop."""


class BackgroundJob:
    """Work on a background thread. `result` or `error` is set once `done` is."""

    def __init__(self, work: Callable[[Progress], Any]) -> None:
        self.started = time.monotonic()
        self.line = ""
        self.done = threading.Event()
        self.result: Any = None
        self.error: PlannerError | None = None
        self.seconds = 0.0
        self._stop = threading.Event()
        self._work = work
        threading.Thread(target=self._run, daemon=True, name="planner").start()

    def _run(self) -> None:
        try:
            self.result = self._work(self._progress)
        except PlannerError as error:
            self.error = error
        except Exception as error:  # noqa: BLE001 - shown on the page: a thread has nobody else to tell
            self.error = PlannerError(
                f"internal error: {type(error).__name__}: {error}",
                why="this is a bug of the program, not of the question",
                remedy="please report it with the link of this page",
            )
        self.seconds = time.monotonic() - self.started
        self.done.set()

    def _progress(self, line: str) -> None:
        self.line = line
        if self._stop.is_set():
            raise Stopped("stopped")

    def stop(self) -> None:
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()


def ask(
    kind: str, key: str, work: Callable[[Progress], Any], *, title: str, meanwhile: Callable[[], None] | None = None
) -> Any:
    """Return the result of `work`, or show its progress and end the page here. Raises what the work raises.

    `meanwhile` draws what is already known, below the progress.
    """
    finished = _finished()
    if (kind, key) in finished:
        return finished[kind, key]
    kept: dict[str, BackgroundJob] = state.results().setdefault(kind, {})
    for other, job in kept.items():
        if other != key and not job.done.is_set():
            job.stop()  # the question has changed, so its result is not needed
    if key in kept and kept[key].stopped and st.session_state.get(f"_stopped_{kind}") != key:
        del kept[key]
    if key not in kept:
        kept.clear()
        kept[key] = BackgroundJob(work)
    job = kept[key]
    if st.session_state.get(f"_stopped_{kind}") == key:
        _stopped(kind, key, kept, title)
    if not job.done.wait(st.session_state.get("_patience_s", PATIENCE_S)):
        _panel(kind, key, job, title)
        if meanwhile is not None:
            meanwhile()
        st.stop()
    if job.error is not None:
        raise job.error
    _share(finished, kind, key, job.result)
    return job.result


@st.cache_resource(show_spinner=False)
def _finished() -> dict[tuple[str, str], Any]:
    """Return the results of all sessions, by kind and key. They are frozen, so that sessions can share them."""
    return {}


def _share(finished: dict[tuple[str, str], Any], kind: str, key: str, result: Any) -> None:
    """Keep a result for all sessions; of each kind only the newest MAX_RESULTS."""
    same_kind = [pair for pair in list(finished) if pair[0] == kind]
    for old in same_kind[: max(0, len(same_kind) + 1 - MAX_RESULTS[kind])]:
        finished.pop(old, None)
    finished[kind, key] = result


@st.fragment(run_every=0.4)
def _panel(kind: str, key: str, job: BackgroundJob, title: str) -> None:
    """Show the progress of a job. Only this fragment of the page runs again until the job is done."""
    if job.done.is_set():
        st.rerun()
    with st.container(border=True):
        left, right = st.columns([5, 1], vertical_alignment="center")
        with left:
            st.markdown(f":material/hourglass_top: **{title}** · {time.monotonic() - job.started:.0f} s")
            st.caption(job.line or "starting")
        if right.button("Stop", key=f"stop_{kind}", icon=":material/stop_circle:", width="stretch"):
            job.stop()
            st.session_state[f"_stopped_{kind}"] = key
            st.rerun()


def _stopped(kind: str, key: str, kept: dict[str, BackgroundJob], title: str) -> None:
    with st.container(border=True):
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.markdown(f":material/stop_circle: **{title}**: stopped. Change the question, or start it again.")
        if right.button("Start again", key=f"again_{kind}", width="stretch"):
            st.session_state.pop(f"_stopped_{kind}", None)
            kept.pop(key, None)
            st.rerun()
    st.stop()
