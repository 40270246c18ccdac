"""Which face answers a request, from nothing but its host, headers and path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.api.routing import ENVD_PORT, BadRouteError, Face, Named, Route, decide, domains_of, host_name
from skerry.core import ids

ID = "sb0123456789abcdefghjk"
DOMAINS = domains_of("boxes.example.com:8443")
SANDBOX_IDS = st.text("abcdefghjkmnpqrstvwxyz0123456789", min_size=1, max_size=30)
PORTS = st.integers(1, 65535)


def route(
    path: str = "/", host: str | None = "127.0.0.1:7070", sandbox: str | None = None, port: str | None = None
) -> Route:
    headers = [
        (name, value.encode("latin-1"))
        for name, value in ((b"host", host), (b"e2b-sandbox-id", sandbox), (b"e2b-sandbox-port", port))
        if value is not None
    ]
    return decide(headers, path.encode("latin-1"), DOMAINS)


def face_of(port: int) -> Face:
    return Face.ENVD if port == ENVD_PORT else Face.PORT


@given(SANDBOX_IDS, PORTS, st.sampled_from(["localhost", "localhost.", "LOCALHOST", "boxes.example.com"]),
       st.sampled_from(["", ":7070"]), st.text(max_size=20))  # fmt: skip
def test_a_host_names_sandbox_and_port_whatever_the_path(
    sandbox: str, port: int, domain: str, own: str, path: str
) -> None:
    headers = [(b"host", f"{port}-{sandbox}.{domain}{own}".encode())]
    found = decide(headers, b"/" + path.encode(), DOMAINS)
    assert found == Route(face_of(port), Named.HOST, sandbox, port)


@given(SANDBOX_IDS, PORTS, st.sampled_from(["127.0.0.1", "[::1]:7070", "localhost", "sandbox.boxes.example.com"]))
def test_headers_name_sandbox_and_port(sandbox: str, port: int, host: str) -> None:
    assert route("/health", host, sandbox, str(port)) == Route(face_of(port), Named.HEADERS, sandbox, port)


@given(SANDBOX_IDS, PORTS, st.sampled_from(["", "/", "/a%2Fb", "//x", "/../up", "/v1/sandboxes"]))
def test_a_path_names_sandbox_and_port_and_leaves_the_rest_alone(sandbox: str, port: int, rest: str) -> None:
    found = route(f"/v1/sandboxes/{sandbox}/ports/{port}{rest}")
    assert found == Route(face_of(port), Named.PATH, sandbox, port, rest.encode() or b"/")


@given(st.binary(max_size=60), st.lists(st.tuples(st.sampled_from(
    [b"host", b"e2b-sandbox-id", b"e2b-sandbox-port", b"other"]), st.binary(max_size=60)), max_size=6))  # fmt: skip
def test_whatever_comes_is_routed_or_refused(path: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    try:
        found = decide(headers, b"/" + path, DOMAINS)
    except BadRouteError:
        return
    if found.face is Face.PORT:
        assert found.sandbox_id
        assert found.port
        assert found.port != ENVD_PORT


@given(st.sampled_from(["", "0", "65536", "99999999", "x", "80 80", "-1", "٨٠", "8\n"]))
def test_a_wrong_port_is_refused(port: str) -> None:
    with pytest.raises(BadRouteError):
        decide([(b"host", f"{port}-{ID}.localhost".encode())], b"/", DOMAINS)
    with pytest.raises(BadRouteError):
        decide([(b"e2b-sandbox-id", ID.encode()), (b"e2b-sandbox-port", port.encode() or b"-")], b"/", DOMAINS)


@pytest.mark.parametrize("sandbox", ["", "UPPER/", "a-b", "a.b", "a" * 65, "%41"])
def test_a_wrong_id_is_refused(sandbox: str) -> None:
    with pytest.raises(BadRouteError):
        route(sandbox=sandbox, port="80")


def test_one_header_alone_or_twice_is_refused() -> None:
    with pytest.raises(BadRouteError, match="missing header: E2b-Sandbox-Port"):
        route(sandbox=ID)
    with pytest.raises(BadRouteError, match="missing header: E2b-Sandbox-Id"):
        route(port="80")
    for name in (b"e2b-sandbox-id", b"e2b-sandbox-port", b"host"):
        headers = [(b"host", b"x"), (b"e2b-sandbox-id", ID.encode()), (b"e2b-sandbox-port", b"80")]
        with pytest.raises(BadRouteError, match="more than on"):
            decide([*headers, (name, b"80")], b"/", DOMAINS)


def test_the_host_wins_over_headers_and_both_over_the_path() -> None:
    path = "/v1/sandboxes/other/ports/1/"
    assert route(path, f"80-{ID}.localhost", "another", "90").sandbox_id == ID
    assert route(path, "127.0.0.1", ID, "90") == Route(Face.PORT, Named.HEADERS, ID, 90)


@pytest.mark.parametrize(
    "host",
    [
        f"80-{ID}.evil.com",
        f"80-{ID}",
        f"80-{ID}.sub.boxes.example.com",
        f"80-{ID}.com",
        "boxes.example.com",
        "api.boxes.example.com",
        "sandbox.boxes.example.com",
        "",
        None,
        "[80-x.localhost]",
    ],
)
def test_other_hosts_name_no_sandbox(host: str | None) -> None:
    assert route("/x", host).face is Face.NATIVE


@pytest.mark.parametrize(
    ("path", "face"),
    [
        ("/v1/sandboxes", Face.NATIVE),
        ("/v1/sandboxes/x/ports", Face.NATIVE),
        ("/health", Face.NATIVE),
        ("/metrics", Face.NATIVE),
        ("/", Face.NATIVE),
        ("", Face.NATIVE),
        ("/filesystem", Face.NATIVE),
        ("/sandboxes", Face.CONTROL),
        ("/sandboxes/x/timeout", Face.CONTROL),
        ("/v2/sandboxes", Face.CONTROL),
        ("/v3/templates", Face.CONTROL),
        ("/templates/x", Face.CONTROL),
        ("/snapshots", Face.CONTROL),
        ("/secrets", Face.CONTROL),
        ("/volumes", Face.CONTROL),
        ("/files", Face.ENVD),
        ("/process.Process/Start", Face.ENVD),
        ("/filesystem.Filesystem/Stat", Face.ENVD),
    ],
)
def test_paths_that_name_no_sandbox(path: str, face: Face) -> None:
    assert route(path) == Route(face)


@given(st.binary(max_size=80))
def test_a_host_header_of_any_bytes_is_read(value: bytes) -> None:
    assert host_name(value) == host_name(value).lower()


def test_real_ids_fit_in_a_host_name() -> None:
    label = f"65535-{ids.new_id(ids.SANDBOX)}"
    assert len(label) <= 63
    assert route(host=f"{label}.localhost").port == 65535
