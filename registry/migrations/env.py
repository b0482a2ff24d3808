"""Alembic's entry: runs on the connection that registry.database hands over. There is no alembic.ini."""

from alembic import context

from registry.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
