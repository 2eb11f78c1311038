"""What may travel on to the engine, and that no spelling of a path gets around it."""

import posixpath
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.allowlist import CONTROL_PATHS, NEVER, READ_ONLY_PATHS, AllowList

DEFAULT = AllowList()
DENIED = {*(path.lower() for path in CONTROL_PATHS), f"/{NEVER}"}


def status(method: str, path: str, allow: AllowList = DEFAULT, kind="http") -> int:
    return allow.judge(method, path.encode("latin-1"), kind).status


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/models/org%2Fname",
        "/v1/models/caf%C3%A9",
        "/v1/models/a.b..c",
        "/v1/files/...",
        "/v1/models/",
        "/v2/rerank",
        "/inference/v1/generate",
        "/cohere/v2/chat",
        "/tokenize",
        "/health",
        "/docs/oauth2-redirect",
        "/openapi.json",
        "/score",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
def test_inference_and_its_company_pass(method, path):
    """With every ordinary method: the engine knows its own."""
    assert DEFAULT.judge(method, path.encode(), "http").admitted


@pytest.mark.parametrize("path", sorted(READ_ONLY_PATHS))
def test_states_can_be_read_and_not_written(path):
    """GET and HEAD; the refusal names the way out."""
    assert [status(method, path) for method in ("GET", "HEAD", "POST", "PUT")] == [200, 200, 403, 403]
    assert "proxy.extra_paths" in DEFAULT.judge("POST", path.encode(), "http").reason


@pytest.mark.parametrize("path", [*sorted(CONTROL_PATHS), "/fault_tolerance/reset", "/fault_tolerance"])
def test_control_paths_are_forbidden_unless_named(path):
    """403 with the setting that would allow it; an exact entry does."""
    verdict = DEFAULT.judge("POST", path.encode(), "http")
    assert (verdict.admitted, verdict.status) == (False, 403)
    assert "proxy.extra_paths" in verdict.reason
    assert status("POST", path, AllowList((path,))) == 200


@pytest.mark.parametrize("path", sorted(CONTROL_PATHS))
def test_a_prefix_never_opens_a_control_path(path):
    """Not even the root."""
    assert status("POST", path, AllowList(("/",))) == 403


@pytest.mark.parametrize("path", ["/collective_rpc", "/collective_rpc/", "/v1/collective_rpc", "/x%2Fcollective_rpc"])
def test_collective_rpc_is_never_proxied(path):
    """Under any prefix: an engine with --root-path answers there too."""
    assert status("POST", path) == 403
    assert status("POST", path, AllowList(("/", "/x/"))) == 403


@pytest.mark.parametrize("path", ["/v1/pause", "/v2/sleep/", "/v1/fault_tolerance/reset", "/v1%2Fpause"])
def test_control_paths_one_level_down_are_forbidden_too(path):
    """That is where --root-path /v1 would put them."""
    assert status("POST", path) == 403


@pytest.mark.parametrize("path", ["/v1/a/pause", "/v1/a/b/sleep/", "/v1/a/fault_tolerance/reset", "/v1/A%2FPause"])
def test_nothing_is_done_by_a_control_path_further_down(path):
    """That is where a longer --root-path would put them; to read there is to read a model's name."""
    assert status("POST", path) == 403
    assert status("POST", path, AllowList(("/",))) == 403


def test_a_model_may_be_called_like_a_control_path():
    """Two levels down it is a name."""
    assert status("GET", "/v1/models/pause") == 200


@pytest.mark.parametrize("path", ["/", "/v1", "/V1/models", "/HEALTH", "/v1x/y", "/memory", "/health/", "/%76ersion/x"])
def test_unknown_paths_are_not_found(path):
    """Matching is literal and case-sensitive; 404 names the setting."""
    verdict = DEFAULT.judge("GET", path.encode(), "http")
    assert verdict.status == 404
    assert "proxy.extra_paths" in verdict.reason


def test_an_encoded_slash_cannot_build_a_prefix():
    """The literal path must begin as the list has it."""
    assert status("GET", "/v1%2Fmodels") == 404


@pytest.mark.parametrize(
    "path",
    [
        "",
        "*",
        "v1/models",
        "http://engine/v1/models",
        "/v1/../health",
        "/v1/%2e%2E/collective_rpc",
        "/v1/./models",
        "/v1/..",
        "/v1/..%2Fpause",
        "//v1/models",
        "/v1//models",
        "/v1/%2Fmodels",
        "/v1/a%5C..%5Cb",
        "/v1/a\\b",
        "/v1/a;b",
        "/v1/a%3Bb",
        "/v1/a%00",
        "/v1/a%0d%0aX:1",
        "/v1/a%7F",
        "/v1/a b",
        "/v1/a#b",
        "/v1/a?b",
        "/v1/%",
        "/v1/%zz",
        "/v1/%252e%252e/pause",
        "/v1/%C0%AE%C0%AE/pause",
        "/v1/caf\u00e9",
    ],
)
def test_a_malformed_path_is_refused_not_repaired(path):
    """400, whatever it would have become."""
    verdict = AllowList(("/",)).judge("GET", path.encode("latin-1"), "http")
    assert (verdict.admitted, verdict.status) == (False, 400)
    assert "malformed" in verdict.reason


@pytest.mark.parametrize("method", ["CONNECT", "TRACE"])
def test_tunnels_and_traces_are_forbidden(method):
    """One asks for a tunnel, the other shows headers."""
    assert status(method, "/v1/models") == 403


def test_websockets_are_judged_as_gets():
    """The same table."""
    assert status("GET", "/v1/realtime", kind="websocket") == 200
    assert status("GET", "/pause", kind="websocket") == 403


def test_extra_entries_are_exact_unless_they_end_in_a_slash():
    """A slash opens what is below it."""
    allow = AllowList(("/custom/", "/exact"))
    paths = ["/custom/a", "/custom/", "/custom", "/exact", "/exact/a", "/exactly"]
    assert [status("POST", path, allow) for path in paths] == [200, 200, 404, 200, 404, 404]


@pytest.mark.parametrize(
    "entry", ["", "custom", "/a/../b", "//", "/a%2Fb", "/a?b", "/collective_rpc", "/x/collective_rpc"]
)
def test_an_entry_that_cannot_be_meant_is_an_error(entry):
    """At start, not at the first request."""
    with pytest.raises(ValueError, match=r"proxy\.extra_paths"):
        AllowList((entry,))


SEGMENTS = st.sampled_from(
    [
        "v1",
        "v2",
        "V1",
        "health",
        "models",
        "..",
        ".",
        "",
        "%2e",
        "%2E%2e",
        "%2f",
        "%5c",
        "\\",
        ";x",
        "%00",
        "%25",
        "%252e",
    ]
    + [path.strip("/") for path in sorted(CONTROL_PATHS)]
    + [NEVER, NEVER.upper(), "collective%5frpc", "%63ollective_rpc", "fault_tolerance", "pa%75se"]
)
PATHS = st.one_of(
    st.lists(SEGMENTS, max_size=6).map(lambda parts: "/" + "/".join(parts)),
    st.lists(st.one_of(SEGMENTS, st.sampled_from(["/", "%2F"])), max_size=8).map("".join),
    st.binary(max_size=40).map(lambda raw: "/v1/" + raw.decode("latin-1")),
    st.text(max_size=40).map(lambda text: "/v1/" + text.encode().decode("latin-1")),
)


@given(path=PATHS, method=st.sampled_from(["GET", "POST"]), extra=st.sampled_from([(), ("/",), ("/v1/x", "/custom/")]))
@example(path="/v1/%2e%2e/collective_rpc", method="POST", extra=())
@example(path="/v1/..%2fpause", method="POST", extra=("/",))
def test_no_admitted_path_resolves_to_a_denied_one(path, method, extra):
    """However often it is decoded, resolved as a path and compared without case."""
    if not AllowList(extra).judge(method, path.encode("latin-1"), "http").admitted:
        return
    for _ in range(3):
        resolved = posixpath.normpath(path.replace("\\", "/")).lower()
        assert "/" + resolved.strip("/") not in DENIED
        assert NEVER not in resolved.split("/")
        path = unquote(path)
