"""What the documents point at exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs/SPECIFICATION.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    for file, function in named:
        tree = ast.parse((ROOT / file).read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}, (
            f"{file} has no {function}"
        )
    promises = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert [p for p in promises if "tests/" not in p] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
