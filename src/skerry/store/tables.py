"""The tables as the code sees them. Migrations make them; a test holds that both say the same."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
    true,
)

from skerry.store.types import UtcTime, json_type

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("name", String(128), nullable=False, unique=True),
    Column("max_sandboxes", Integer, nullable=False),
    Column("max_lifetime_ms", BigInteger, nullable=False),
    Column("created_at", UtcTime(), nullable=False),
    Column("max_snapshots", Integer, nullable=False, server_default=text("100")),
    Column("max_paused", Integer, nullable=False, server_default=text("100")),
)

projects = Table(
    "projects",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("created_at", UtcTime(), nullable=False),
    UniqueConstraint("tenant_id", "name"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False, index=True),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("prefix", String(32), nullable=False),
    Column("secret_hash", LargeBinary(32), nullable=False, unique=True),
    Column("scopes", json_type(), nullable=False),
    Column("created_at", UtcTime(), nullable=False),
    Column("last_used_at", UtcTime()),
    Column("revoked_at", UtcTime()),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
    Column("template", String(257), nullable=False),
    Column("cpu", Integer, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("disk_mb", Integer, nullable=False),
    Column("timeout_ms", BigInteger, nullable=False),
    Column("idle_timeout_ms", BigInteger),
    Column("metadata", json_type(), nullable=False),
    Column("state", String(16), nullable=False),
    Column("node_id", String(64), nullable=False),
    Column("created_at", UtcTime(), nullable=False),
    Column("started_at", UtcTime()),
    Column("expires_at", UtcTime(), nullable=False),
    Column("ended_at", UtcTime()),
    Column("end_reason", String(32)),
    Column("error", Text),
    Column("start_kind", String(16)),
    Column("auto_pause", Boolean, nullable=False, server_default=false()),
    Column("auto_resume", Boolean, nullable=False, server_default=false()),
    Column("paused_at", UtcTime()),
    Column("remaining_ms", BigInteger),
    Column("rested_ms", BigInteger, nullable=False, server_default=text("0")),
    # No foreign key: a snapshot may be deleted while what was made of it lives on.
    Column("snapshot_id", String(32)),
    Column("public_ports", Boolean, nullable=False, server_default=true()),
    Column("mask_request_host", String(255)),
    Column("auto_pause_memory", Boolean, nullable=False, server_default=true()),
    Column("secret_env", json_type(), nullable=False, server_default=text("'{}'")),
    Column("secret_files", json_type(), nullable=False, server_default=text("'{}'")),
    # Its own say about what may leave it, as an object; the empty one: it says nothing.
    Column("network", json_type(), nullable=False, server_default=text("'{}'")),
    Index("ix_sandboxes_page", "tenant_id", "created_at", "id"),
    Index("ix_sandboxes_state", "state", "tenant_id"),
)

egress_policies = Table(
    "egress_policies",
    metadata,
    Column("project_id", ForeignKey("projects.id"), primary_key=True),
    # The template within the project that it is for; the empty name: the project's own.
    Column("template", String(257), primary_key=True),
    Column("mode", String(16), nullable=False),
    Column("allow", json_type(), nullable=False),
    Column("deny", json_type(), nullable=False),
    Column("updated_at", UtcTime(), nullable=False),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
    Column("name", String(128)),
    Column("sandbox_id", ForeignKey("sandboxes.id"), nullable=False, index=True),
    Column("template", String(257), nullable=False),
    Column("memory", Boolean, nullable=False),
    Column("cpu", Integer, nullable=False),
    Column("memory_mb", Integer, nullable=False),
    Column("disk_mb", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("error", Text),
    Column("size_bytes", BigInteger),
    Column("stood_still_ms", Float(53)),
    Column("node_id", String(64), nullable=False),
    Column("created_at", UtcTime(), nullable=False),
    Column("holds_secrets", Boolean, nullable=False, server_default=false()),
    Index("ix_snapshots_page", "tenant_id", "created_at", "id"),
    # Not unique: a name stands for the newest that was taken under it.
    Index("ix_snapshots_name", "project_id", "name", "created_at"),
)

tenant_keys = Table(
    "tenant_keys",
    metadata,
    Column("tenant_id", ForeignKey("tenants.id"), primary_key=True),
    Column("root_key_id", String(16), nullable=False),
    # Gone once it is destroyed: then nothing of the tenant's opens any more.
    Column("wrapped", LargeBinary),
    Column("created_at", UtcTime(), nullable=False),
    Column("destroyed_at", UtcTime()),
)

secrets = Table(
    "secrets",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("project_id", ForeignKey("projects.id"), nullable=False),
    Column("name", String(128), nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", UtcTime(), nullable=False),
    Column("updated_at", UtcTime(), nullable=False),
    # Deleted, and still to be looked for in the output of who was given it.
    Column("deleted_at", UtcTime()),
    Index(
        "uq_secrets_name",
        "project_id",
        "name",
        unique=True,
        sqlite_where=text("deleted_at IS NULL"),
        postgresql_where=text("deleted_at IS NULL"),
    ),
)

secret_versions = Table(
    "secret_versions",
    metadata,
    Column("secret_id", ForeignKey("secrets.id"), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("sealed", LargeBinary, nullable=False),
    Column("created_at", UtcTime(), nullable=False),
)

secret_uses = Table(
    "secret_uses",
    metadata,
    # A sandbox's or a snapshot's id: in its memory the value may be.
    Column("holder_id", String(32), primary_key=True),
    Column("secret_id", String(32), primary_key=True),
    Column("version", Integer, primary_key=True),
    ForeignKeyConstraint(["secret_id", "version"], ["secret_versions.secret_id", "secret_versions.version"]),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("tenant_id", ForeignKey("tenants.id"), primary_key=True),
    Column("key_hash", LargeBinary(32), primary_key=True),
    Column("body_hash", LargeBinary(32), nullable=False),
    # No foreign key: a snapshot may be deleted before its key is forgotten, and a fork has no row of its own.
    Column("subject", String(32), nullable=False, index=True),
    Column("made", json_type(), nullable=False),
    Column("created_at", UtcTime(), nullable=False, index=True),
)

audit_events = Table(
    "audit_events",
    metadata,
    # The position: the one order of all records.
    Column("seq", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=True),
    Column("id", String(32), nullable=False, unique=True),
    Column("at", UtcTime(), nullable=False),
    Column("tenant_id", String(32), nullable=False),
    Column("project_id", String(32)),
    Column("actor", String(32), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(32)),
    Column("outcome", String(16), nullable=False),
    Column("detail", json_type(), nullable=False),
    Index("ix_audit_events_subject", "subject", "seq"),
    sqlite_autoincrement=True,
)
