"""Alembic's scripts. `skerry.store.migrate` runs them when a store is opened."""
