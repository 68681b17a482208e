"""Settings of all tests. Prefer fixtures to classes, and parametrize to loops; say in each docstring what is true."""

import gc
import itertools
import os
import signal

import pytest
from hypothesis import settings

pytest_plugins = ["tests.workers"]

# How long one example takes depends on the machine, and no test asserts time. The gate tries the same examples every
# day, so that it ends the same for the same tree; `MESHWRIGHT_HYPOTHESIS=explore`, every night, draws new ones.
settings.register_profile("gate", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("MESHWRIGHT_HYPOTHESIS", "gate"))

# Tests interrupt what they start. A shell that runs them in the background has them ignore SIGINT, which children
# inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--update-goldens",
        action="store_true",
        help="write what commands print to tests/data/texts, for a person to read in the diff",
    )


# What collecting makes stays until the end: the garbage collector need not look for it, now or later.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # most of what tests make ends without a cycle: looking less often saves a tenth
    gc.enable()


@pytest.fixture(scope="session")
def _data_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_data_folder(_data_folders, monkeypatch):
    """No test adds to the runs of the person who runs the tests."""
    folder = next(_data_folders)
    folder.mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(folder))


@pytest.fixture(autouse=True)
def ageless_profiles(monkeypatch):
    """The shipped profiles do not grow old in tests, which must end the same on any day."""
    monkeypatch.setattr("simulator.fitting.calibrations.MAX_AGE_DAYS", 10**6)
