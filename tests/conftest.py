"""Settings of all tests. Prefer fixtures to classes, and parametrize to loops; say in each docstring what is true."""

import pytest
from hypothesis import settings

# How long one example takes depends on the machine, and no test asserts time.
settings.register_profile("meshwright", deadline=None)
settings.load_profile("meshwright")


@pytest.fixture(autouse=True)
def _own_data_folder(tmp_path_factory, monkeypatch):
    """No test adds to the runs of the person who runs the tests."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))


@pytest.fixture(autouse=True)
def ageless_profiles(monkeypatch):
    """The shipped profiles do not grow old in tests, which must end the same on any day."""
    monkeypatch.setattr("simulator.fitting.calibration_fit.MAX_AGE_DAYS", 10**6)
