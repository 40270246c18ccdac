"""Column types that read the same from both databases."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, DateTime, String
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine


class UtcTime(TypeDecorator[datetime]):
    """An aware UTC time with microseconds.

    PostgreSQL keeps `timestamptz`. SQLite has no time type: fixed-width ISO 8601 text, whose order is time's order.
    Naive times are refused (ValueError): a guess about their zone would be wrong somewhere.
    """

    impl = DateTime
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        if dialect.name == "postgresql":
            return dialect.type_descriptor(DateTime(timezone=True))
        return dialect.type_descriptor(String(27))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a time without a zone cannot be stored")
        utc = value.astimezone(UTC)
        return utc if dialect.name == "postgresql" else utc.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        if isinstance(value, datetime):
            return value.astimezone(UTC)
        return datetime.strptime(value, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)


def json_type() -> TypeEngine[Any]:
    """JSON that both databases can look into."""
    return JSON().with_variant(JSONB(), "postgresql")
