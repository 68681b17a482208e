"""The service's queue in this process (`planner.service.queue`): runs and tunings that outlive a page.

It is the queue of `planner service` on this machine, in the same database, so that both show the same jobs.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import platformdirs
import streamlit as st

from planner.remote.settings import Settings

if TYPE_CHECKING:
    from planner.service.queue import Queue

NEEDS = ("fastapi", "pydantic", "sqlalchemy", "alembic")
USER = "local"


def missing() -> list[str]:
    """Return the packages that the queue needs and that are not installed."""
    return [name for name in NEEDS if find_spec(name) is None]


@st.cache_resource(show_spinner=False)
def queue() -> Queue:
    """Return the queue that all sessions share, at work. Raises PlannerError where its database cannot be used."""
    from planner.service.queue import Queue as Shared  # noqa: PLC0415 - needs the extra `service`

    folder = platformdirs.user_data_path("meshwright", appauthor=False) / "service"
    found = Shared(Settings(folder=str(folder), workers=1))
    found.dispatcher.start()
    return found
