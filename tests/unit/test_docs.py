"""What the documents point at exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def named_tests_exist(text: str) -> None:
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert len(named) > 20
    for test in named:
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}, (
            f"{file} has no {function}"
        )


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs/SPECIFICATION.md").read_text()
    named_tests_exist(text)
    promises = re.split(r"^\d+\. ", text, flags=re.MULTILINE)[1:]
    assert [p for p in promises if "tests/" not in p] == []


def test_every_case_names_tests_that_exist_or_says_what_is_not_there_yet() -> None:
    text = (ROOT / "docs/CASES.md").read_text()
    named_tests_exist(text)
    _, *cases = re.split(r"^- \*\*BUG-", text, flags=re.MULTILINE)
    assert len({case[:2] for case in cases}) == len(cases) == 40
    assert [c for c in cases if "tests/" not in c and "Later: " not in c] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"
