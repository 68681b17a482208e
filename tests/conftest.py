"""Settings of all tests. Prefer fixtures to classes, and parametrize to loops; say in each docstring what is true."""

import os
import signal

import pytest
from hypothesis import settings

# How long one example takes depends on the machine, and no test asserts time. The gate tries the same examples every day, so
# that it ends the same for the same tree; `MESHWRIGHT_HYPOTHESIS=explore` draws new ones.
settings.register_profile("gate", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("MESHWRIGHT_HYPOTHESIS", "gate"))

# Tests interrupt what they start. A shell that runs them in the background has them ignore SIGINT, which children inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path_factory, monkeypatch):
    """No test adds to the runs of the person who runs the tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))


@pytest.fixture(autouse=True)
def ageless_profiles(monkeypatch):
    """The shipped profiles do not grow old in tests, which must end the same on any day."""
    monkeypatch.setattr("simulator.fitting.calibrations.MAX_AGE_DAYS", 10**6)
