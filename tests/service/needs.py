"""Imported first by tests that need the service's packages: where they are missing, the module is skipped and says
why.
"""

import pytest

for name in ("fastapi", "uvicorn", "sqlalchemy", "alembic", "httpx"):
    pytest.importorskip(name, reason=f"{name} is not installed: pip install 'meshwright[service]'")
