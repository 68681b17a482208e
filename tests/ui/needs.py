"""Imported first by tests that need the explorer's packages: where they are missing, the module is skipped and says
why.
"""

import pytest

for name in ("streamlit", "altair"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'meshwright[ui]'")
