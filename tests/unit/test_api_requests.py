"""From bytes to checked values: what is refused, in which words, and what survives."""

import json
from typing import Any

import pytest
from starlette.requests import Request

from skerry.api import requests, schemas
from skerry.api.v1.files import Range, range_of
from skerry.core.errors import InvalidRequest, Unauthenticated


def request(*, query: bytes = b"", headers: dict[str, str] | None = None) -> Request:
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "GET", "path": "/", "query_string": query, "headers": raw})


def problems_of(body: dict[str, Any], model: Any = schemas.CreateSandbox) -> dict[str, dict[str, Any]]:
    with pytest.raises(InvalidRequest) as caught:
        requests.validate(model, body)
    return {problem.field: problem.as_dict() for problem in caught.value.problems}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"",
        b"\xff{}",
        b"\xef\xbb\xbf{}",
        b'{"cpu": NaN}',
        b'{"cpu": Infinity}',
        b'{"cpu": 1, "cpu": 2}',
        b'{"a": {"b": 1, "b": 1}}',
        b"[" * 100_000,
        b'{"cpu": ' + b"9" * 10_000 + b"}",
        b"{} {}",
        "{}".encode("utf-16"),
    ],
)
def test_what_is_not_json_is_refused_as_that(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests.parse_json(body)
    assert caught.value.code == "malformed_json"


def test_a_lone_surrogate_passes_through_json() -> None:
    assert requests.parse_json(b'{"path": "a\\udcff"}') == {"path": "a\udcff"}
    assert requests.validate(schemas.MakeDir, {"path": "a\udcff"}).path == "a\udcff"


def test_a_range_says_both_ends() -> None:
    assert problems_of({"cpu": 9})["cpu"] == {
        "field": "cpu",
        "message": "must be from 1 to 8",
        "given": 9,
        "allowed": "1..8",
    }
    assert problems_of({"timeout_ms": 59_999})["timeout_ms"]["allowed"] == "60000..14400000"


def test_types_are_not_coerced() -> None:
    found = problems_of({"cpu": "2", "memory_mb": 512.0, "disk_mb": True, "template": 7, "metadata": []})
    assert set(found) == {"cpu", "memory_mb", "disk_mb", "template", "metadata"}
    assert found["cpu"]["given"] == "2"


def test_unknown_fields_are_refused_with_the_known_ones() -> None:
    found = problems_of({"memory": 512})
    assert found["memory"]["message"] == "is not known here"
    assert "memory_mb" in found["memory"]["allowed"]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (schemas.CreateSandbox, {"env": {"TOKEN": ["hunter2"]}}),
        (schemas.CreateSandbox, {"env": "hunter2"}),
        (schemas.RunCommand, {"argv": ["true"], "stdin": ["hunter2"]}),
        (schemas.StartProcess, {"argv": ["true"], "stdin": "hunter2"}),
    ],
)
def test_secrets_are_not_repeated(model: Any, body: dict[str, Any]) -> None:
    assert "hunter2" not in json.dumps(problems_of(body, model))


def test_a_query_keeps_raw_bytes() -> None:
    asked = requests.query(request(query=b"path=%2Ftmp%2Fa%FF%20b%2Bc+d&user="), schemas.FileQuery)
    assert asked.path == "/tmp/a\udcff b+c d"
    assert asked.user == ""
    assert requests.query(request(query=b"path=\xc3\xa9\xff"), schemas.FileQuery).path == "é\udcff"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (b"path=a&path=b", "path"),
        (b"path=a&depth=x", "depth"),
        (b"path=a&depth=0", "depth"),
        (b"path=a&depth=65", "depth"),
        (b"path=a&recursive=true", "recursive"),
        (b"depth=1", "path"),
    ],
)
def test_a_wrong_query_names_its_parameter(query: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        requests.query(request(query=query), schemas.ListQuery)
    assert [problem.field for problem in caught.value.problems] == [field]


def test_repeatable_parameters_are_lists() -> None:
    asked = requests.query(request(query=b"state=running&state=killed&metadata=a%3D1"), schemas.ListSandboxes)
    assert asked.state == ["running", "killed"]
    assert asked.metadata == ["a=1"]


def test_operations_without_parameters_refuse_any() -> None:
    with pytest.raises(InvalidRequest):
        requests.no_query(request(query=b"x"))
    requests.no_query(request())


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer k1"}, {"X-API-Key": "k1"}, {"Authorization": "bearer  k1 "}]
)
def test_a_key_comes_in_either_header(headers: dict[str, str]) -> None:
    assert requests.key_of(request(headers=headers)) == "k1"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Basic k1"}, {"Authorization": "Bearer "}, {"X-API-Key": " "}]
)
def test_no_key_is_said_as_that(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        requests.key_of(request(headers=headers))
    assert caught.value.code == "key_missing"
    assert "k1" not in caught.value.message


def test_two_different_keys_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        requests.key_of(request(headers={"Authorization": "Bearer a", "X-API-Key": "b"}))


@pytest.mark.parametrize("value", ["", "a b", "é", "x" * 256, "a\tb"])
def test_an_idempotency_key_is_visible_ascii(value: str) -> None:
    with pytest.raises(InvalidRequest):
        requests.idempotency_key(request(headers={"Idempotency-Key": value}))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-0", Range(0, 0, None)),
        ("bytes=5-", Range(5, None, None)),
        ("bytes=-5", Range(None, None, 5)),
        ("bytes=0-99", Range(0, 99, None)),
    ],
)
def test_ranges(value: str, expected: Range) -> None:
    assert range_of(request(headers={"Range": value})) == expected


@pytest.mark.parametrize("value", ["bytes=", "bytes=-", "bytes=0-1,3-4", "lines=0-1", "bytes=5-4", "bytes=a-b", "0-1"])
def test_other_ranges_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest):
        range_of(request(headers={"Range": value}))


def test_if_range_gets_the_whole_file() -> None:
    assert range_of(request(headers={"Range": "bytes=0-1", "If-Range": '"x"'})) is None
