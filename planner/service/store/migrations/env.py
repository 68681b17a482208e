"""Run by Alembic: applies the steps on the connection that `database.py` hands over."""

from alembic import context

from planner.service.store.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
