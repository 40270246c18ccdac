"""What an operator may set about a server, and where it comes from.

Flags win over the environment (`SKERRY_…`), the environment over the file (`/etc/skerry/skerry.toml`, or the one that
`SKERRY_CONFIG` names). An unknown name in the file is refused. `docs/reference/settings.md` lists every setting.
"""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from skerry.core.errors import InvalidRequest, Problem
from skerry.egress.upstream import upstream_of

CONFIG_FILE = Path("/etc/skerry/skerry.toml")
DATA_DIR = Path("/var/lib/skerry")
CACHE_DIR = Path("/var/cache/skerry")
DOMAIN = r"^([A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)*[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(:[0-9]{1,5})?$"
DOMAIN_MAX = 200
ROOT_KEY_FILE = Path("/etc/skerry/root-key")
SYSTEM_CLIENT_FILE = Path("/run/skerry/client.json")


def _split(value: Any) -> Any:
    """A list in one text: a variable's or an option's."""
    return tuple(part.strip() for part in value.split(";") if part.strip()) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]


class Settings(BaseSettings):
    """The settings of `skerry serve`."""

    model_config = SettingsConfigDict(env_prefix="SKERRY_", env_ignore_empty=True, extra="forbid", frozen=True)

    data_dir: Path = Field(DATA_DIR, description="State that must survive: database, disks, journal")
    cache_dir: Path = Field(CACHE_DIR, description="Built images and verdicts of probes")
    host: str = Field("127.0.0.1", min_length=1, description="The address to listen on")
    port: int = Field(7070, ge=0, le=65535, description="The port to listen on; 0 takes any that is free")
    database_url: str | None = Field(
        None,
        description="sqlite:////ABSOLUTE/PATH or postgresql+psycopg://USER@HOST/NAME; by default skerry.db in data_dir",
        repr=False,
    )
    client_file: Path | None = Field(
        None,
        description="Where address and first key are left for clients on this machine; by default "
        "/run/skerry/client.json for root with the default data_dir, else client.json in data_dir",
    )
    domain: str | None = Field(
        None,
        max_length=DOMAIN_MAX,
        pattern=DOMAIN,
        description="Sandboxes' ports have names below it (PORT-ID.DOMAIN), with a :PORT where clients need one; "
        "names below localhost always work",
    )
    domain_scheme: Literal["auto", "http", "https"] = Field(
        "auto",
        description="How clients reach those names; auto: https with tls_cert, else http. Set it where something else "
        "in front ends TLS",
    )
    tls_cert: Path | None = Field(None, description="A certificate (PEM, with its chain) to serve TLS with as well")
    tls_key: Path | None = Field(None, description="Its key (PEM, without a password)")
    tls_port: int = Field(7443, ge=0, le=65535, description="The port to listen on for TLS; 0 takes any that is free")
    token_key_file: Path | None = Field(
        None,
        description="What sandboxes' tokens are made of, made if it is missing; by default token-key in data_dir. "
        "Servers that share it agree on tokens",
    )
    root_key_file: Path | None = Field(
        None,
        description="The key that closes the tenants' keys, made if it is missing and nothing is closed yet; outside "
        "data_dir. By default /etc/skerry/root-key with the default data_dir, else beside it: DATA_DIR-root-key",
    )
    accelerator: Literal["auto", "kvm", "tcg"] = Field("auto", description="auto asks a boot probe")
    qemu: Path | None = Field(None, description="Another qemu-system-x86_64 than the one that is found")
    max_sandboxes: int = Field(200, ge=1, le=10_000, description="The most sandboxes this machine runs at a time")
    max_snapshots: int = Field(
        100, ge=0, le=10_000, description="The most snapshots that the first tenant keeps at a time"
    )
    max_paused: int = Field(
        100, ge=0, le=10_000, description="The most sandboxes of the first tenant that rest at a time"
    )
    pool_floor: int = Field(
        1,
        ge=0,
        le=100,
        description="Warm clones of the default template and shape that stand ready even if nobody asks",
    )
    pool_ceiling: int = Field(
        10, ge=0, le=100, description="The most warm clones of one template and shape; 0: none are made"
    )
    memory_share: float = Field(
        1.5, gt=0, le=10, description="All guests' memory together, as a share of the machine's"
    )
    memory_floor_mb: int = Field(
        512, ge=0, description="No sandbox is created while the machine has less memory than this available"
    )
    disk_floor_mb: int = Field(
        512, ge=0, description="No sandbox is created while the data directory's disk has less than this free"
    )
    disk_mb_per_s: int = Field(
        400,
        ge=0,
        le=1_000_000,
        description="MB that a sandbox reads of its disk in a second, and that it writes; 0: any",
    )
    disk_operations_per_s: int = Field(
        20_000, ge=0, le=100_000_000, description="How often it reads in a second, and how often it writes; 0: any"
    )
    boots_at_once: int = Field(0, ge=0, le=1000, description="VMs that boot at a time; 0: twice the number of CPUs")
    boot_deadline_s: float = Field(
        60.0, gt=0, le=3600, description="How long a VM may take to come up on an idle machine"
    )
    trust_dir: Path = Field(
        Path("/usr/local/share/ca-certificates"),
        description="Sandboxes trust the certificates in its .crt files (PEM) beside the public ones",
    )
    egress_discover: bool = Field(
        default=True,
        description="The curated list of what sandboxes may reach has what this machine's package managers use",
    )
    egress_allow: Texts | None = Field(
        None,
        description="Rules that the curated list has as well (NAME[:PORTS], *.NAME, ADDRESS[/LENGTH], and tunnels "
        "NAME:PORT -> HOST:PORT), separated by semicolons",
    )
    egress_upstream_allow: Texts | None = Field(
        None,
        description="Networks that are not public, in which names that are allowed may lie all the same; separated by "
        "semicolons",
    )
    egress_private_allow: Texts | None = Field(
        None,
        description="What is not public and may be reached where a project's rule names it itself, by a tunnel or an "
        "address: NAME:PORTS or ADDRESS[/LENGTH][:PORTS], separated by semicolons",
    )
    egress_connections: int = Field(1000, ge=1, le=100_000, description="Connections that leave a sandbox at a time")
    egress_connections_per_s: int = Field(
        1000, ge=0, le=1_000_000, description="New ones in a second, and so many at once; 0: any number"
    )
    egress_mb_per_s: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="MB in a second on all of a sandbox's connections, both ways; 0: as many as come",
    )
    egress_proxy: str | None = Field(
        None,
        description="http://[USER:PASSWORD@]HOST[:PORT]: a proxy that is asked to CONNECT to what is not private",
        repr=False,
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="The least that is logged")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: console on a terminal, else one JSON object a line"
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024,
        ge=65_536,
        le=256 * 1024 * 1024,
        description="The largest JSON body of a request; files and standard input are streamed and have no such limit",
    )
    stop_grace_s: int = Field(10, ge=0, le=600, description="How long a stopping server waits for requests under way")

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'skerry.db'}"

    @property
    def client_path(self) -> Path:
        if self.client_file is not None:
            return self.client_file
        if os.geteuid() == 0 and self.data_dir == DATA_DIR:
            return SYSTEM_CLIENT_FILE
        return self.data_dir / "client.json"

    def sandboxes_domain(self, plain_port: int) -> str:
        """Below which sandboxes have names, perhaps with a port; `plain_port`: the one we listen on."""
        return f"localhost:{plain_port}" if self.domain is None else self.domain.lower()

    def port_url(self, plain_port: int) -> str:
        """How a sandbox's ports are reached by name, with `{port}` and `{id}`."""
        secure = self.tls_cert is not None if self.domain_scheme == "auto" else self.domain_scheme == "https"
        scheme = "https" if secure and self.domain is not None else "http"
        return f"{scheme}://{{port}}-{{id}}.{self.sandboxes_domain(plain_port)}"

    @model_validator(mode="after")
    def _pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        return self

    @model_validator(mode="after")
    def _rules(self) -> Self:
        try:
            upstream_of(*self.egress_lists, self.egress_proxy)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def egress_lists(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Upstream, private, and rules."""
        return self.egress_upstream_allow or (), self.egress_private_allow or (), self.egress_allow or ()

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.root_key_path.resolve().is_relative_to(self.data_dir.resolve()):
            raise ValueError("root_key_file lies in data_dir: whoever has the one must not have the other")
        return self

    @property
    def root_key_path(self) -> Path:
        if self.root_key_file is not None:
            return self.root_key_file
        if self.data_dir == DATA_DIR:
            return ROOT_KEY_FILE
        whole = self.data_dir.absolute()
        return whole.with_name(f"{whole.name}-root-key")

    @property
    def token_key_path(self) -> Path:
        return self.token_key_file or self.data_dir / "token-key"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003  (there is none: a file in some directory is no authority)
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        config = Path(os.environ.get("SKERRY_CONFIG") or CONFIG_FILE)
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=config)


def check_domain(domain: str) -> str:
    """The name of a domain, lower-case. Raises InvalidRequest."""
    if ":" in domain or len(domain) > DOMAIN_MAX or not re.fullmatch(DOMAIN, domain):
        raise InvalidRequest.of("DOMAIN", "is not a domain's name", given=domain, allowed="such as boxes.example.com")
    return domain.lower()


def load_settings(**flags: Any) -> Settings:
    """The settings, with `flags` (those that are not None) on top.

    Raises InvalidRequest that names each wrong setting, never the value of one that may hold a password.
    """
    named = os.environ.get("SKERRY_CONFIG")
    if named and not Path(named).is_file():
        raise InvalidRequest.of("SKERRY_CONFIG", "names no file", given=named, code="invalid_settings")
    empty = [Problem(name, "is empty") for name, value in flags.items() if value == ""]
    if empty:
        text = "; ".join(f"{p.field} {p.message}" for p in empty)
        raise InvalidRequest(text, problems=empty, code="invalid_settings")
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        problems = [
            Problem(
                ".".join(str(part) for part in detail["loc"]) or "settings",
                _message(detail["type"], detail["msg"]),
                None if detail["loc"][:1] in {("database_url",), ()} else detail["input"],
            )
            for detail in error.errors(include_url=False)
        ]
        text = "; ".join(f"{p.field}: {p.message}" for p in problems)
        raise InvalidRequest(text, problems=problems, code="invalid_settings") from None
    except (SettingsError, OSError, ValueError) as error:
        raise InvalidRequest(f"the settings cannot be read: {error}", code="invalid_settings") from None


def _message(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "is not a setting"
    return message.removeprefix("Value error, ").replace("Input should be", "must be", 1)
