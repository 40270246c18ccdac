"""Every error code that the source raises has its place in docs/reference/errors.md, and the other way round."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from skerry.core.lifecycle import GONE_CODE
from skerry.guest.errors import ERROR_NAMES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/errors.md"
CODE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def texts(node: ast.expr | None) -> Iterator[str]:
    """The texts that an expression may give."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)


def codes_of(tree: ast.AST) -> Iterator[str]:
    """`code = "…"` of a class, `code="…"` of a call, and what follows the name of an error in a row of texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                if any(isinstance(target, ast.Name) and target.id == "code" for target in targets):
                    yield from texts(getattr(line, "value", None))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "code":
                    yield from texts(keyword.value)
            yield from after_names(node.args)
        elif isinstance(node, ast.Tuple):
            yield from after_names(node.elts)


def after_names(row: list[ast.expr]) -> Iterator[str]:
    for name, code in itertools.pairwise(row):
        if isinstance(name, ast.Constant) and name.value in ERROR_NAMES:
            yield from texts(code)


def used() -> set[str]:
    found = set(GONE_CODE.values())
    for path in (ROOT / "src/skerry").rglob("*.py"):
        found |= {code for code in codes_of(ast.parse(path.read_text())) if CODE.fullmatch(code)}
    return found


def documented() -> list[str]:
    return re.findall(r"^### (\S+)$", PAGE.read_text(), flags=re.MULTILINE)


def test_the_search_finds_codes() -> None:
    assert {"invalid_request", "malformed_json", "sandbox_idle", "process_exited"} <= used()


def test_every_code_is_documented() -> None:
    assert used() - set(documented()) == set()


def test_every_documented_code_stands_in_the_source_and_on_the_page_once() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src/skerry").rglob("*.py"))
    assert [code for code in documented() if f'"{code}"' not in source] == []
    assert len(documented()) == len(set(documented()))
