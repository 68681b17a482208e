"""Run by Alembic: applies the migrations on the connection that `database.py` passes."""

from alembic import context

from planner.service.store.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
