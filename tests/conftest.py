"""Settings of all tests. Prefer fixtures to classes, and parametrize to loops; say in each docstring what is true."""

from hypothesis import settings

# How long one example takes depends on the machine, and no test asserts time.
settings.register_profile("meshwright", deadline=None)
settings.load_profile("meshwright")
