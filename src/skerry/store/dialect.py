"""The few statements that the two databases write differently."""

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Insert, Table, and_, column, exists, func, select, true, type_coerce
from sqlalchemy.dialects import postgresql, sqlite


def insert_or_ignore(dialect: str, table: Table, conflict: Sequence[str] | None = None) -> Insert:
    """INSERT that leaves an existing row with the same `conflict` columns alone (and then counts no row).

    None: a row that is in the way by whatever the table holds to be unique."""
    columns = list(conflict) if conflict is not None else None
    if dialect == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing(index_elements=columns)
    return sqlite.insert(table).on_conflict_do_nothing(index_elements=columns)


def json_has(dialect: str, document: ColumnElement, wanted: dict[str, str]) -> ColumnElement[bool]:
    """Whether a JSON object of texts holds all of these entries. Keys are data: any character may be in them."""
    if not wanted:
        return true()
    if dialect == "postgresql":
        return document.op("@>", is_comparison=True)(type_coerce(wanted, postgresql.JSONB()))
    each = func.json_each(document).table_valued(column("key"), column("value"))
    return and_(
        *(
            exists(select(1).select_from(e := each.alias(f"m{n}")).where(e.c.key == key, e.c.value == value))
            for n, (key, value) in enumerate(sorted(wanted.items()))
        )
    )
