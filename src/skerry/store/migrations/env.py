"""Alembic's entry: runs in the connection and the transaction that the store hands over."""

from alembic import context

from skerry.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
context.run_migrations()
