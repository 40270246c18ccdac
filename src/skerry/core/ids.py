"""Identifiers: lower-case letters and digits only, so that any of them can stand in a host name.

An id is a two- or three-letter prefix that names its kind and 20 random characters of a 32-letter alphabet (100 bits).
"""

import re
import secrets
from typing import Final

ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"  # without i, l, o, u: nothing to misread
RANDOM_LENGTH: Final = 20

SANDBOX: Final = "sb"
TENANT: Final = "tn"
PROJECT: Final = "pj"
API_KEY: Final = "key"
PROCESS: Final = "pr"
EVENT: Final = "ev"
TEMPLATE: Final = "tpl"
BUILD: Final = "bld"
SNAPSHOT: Final = "snp"
FORK: Final = "fk"
WATCH: Final = "wt"
NODE: Final = "nd"
STEP: Final = "stp"
SECRET: Final = "sec"  # noqa: S105 - the kind of an id

PATTERN: Final = re.compile(r"[a-z]{2,3}[0-9a-z]{20}")


START_PROCESS: Final = PROCESS + "start" + "0" * (RANDOM_LENGTH - 5)
"""The process of a template's start command, in every sandbox of the template."""


def new_id(prefix: str) -> str:
    """A new random id of the kind that `prefix` names."""
    return prefix + "".join(secrets.choice(ALPHABET) for _ in range(RANDOM_LENGTH))


def is_id(value: str, prefix: str) -> bool:
    """Whether `value` has the form of an id of this kind (it says nothing about whether such a thing exists)."""
    return (
        value.startswith(prefix) and len(value) == len(prefix) + RANDOM_LENGTH and PATTERN.fullmatch(value) is not None
    )
