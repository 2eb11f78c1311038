"""What may travel on to the engine, and that no spelling of a path gets around it."""

import posixpath
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gated_proxy.allowlist import (
    CONTROL_PATHS,
    INFERENCE_PREFIXES,
    NEVER,
    READ_ONLY_PATHS,
    AllowList,
    read_path,
    root_path_flaw,
)
from tests.fakes.vllm_routes import recorded

DEFAULT = AllowList()
DENIED = {*(path.lower() for path in CONTROL_PATHS), f"/{NEVER}"}


def status(method: str, path: str, allow: AllowList = DEFAULT) -> int:
    return allow.decide(method, read_path(path.encode("latin-1"))).status


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
        "/generative_scoring",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
def test_inference_and_its_company_pass(method, path):
    assert DEFAULT.decide(method, read_path(path.encode())).admitted


@pytest.mark.parametrize("path", sorted(READ_ONLY_PATHS))
def test_states_can_be_read_and_not_written(path):
    assert [status(method, path) for method in ("GET", "HEAD", "POST", "PUT")] == [200, 200, 403, 403]
    assert "proxy.extra_paths" in DEFAULT.decide("POST", read_path(path.encode())).reason


@pytest.mark.parametrize("path", [*sorted(CONTROL_PATHS), "/fault_tolerance/reset", "/fault_tolerance"])
def test_control_paths_are_forbidden_unless_named(path):
    decision = DEFAULT.decide("POST", read_path(path.encode()))
    assert (decision.admitted, decision.status) == (False, 403)
    assert "proxy.extra_paths" in decision.reason
    assert status("POST", path, AllowList((path,))) == 200


def test_the_engines_metrics_are_read_where_ours_are_elsewhere():
    allowed = AllowList(root_path="/llm", has_metrics=True)
    assert [status(method, "/metrics", allowed) for method in ("GET", "HEAD", "POST")] == [200, 200, 403]
    assert [status("GET", path, allowed) for path in ("/llm/metrics", "/metrics/", "/x/metrics")] == [200, 403, 403]
    assert status("GET", "/metrics", AllowList()) == 403


@pytest.mark.parametrize("path", sorted(CONTROL_PATHS))
def test_a_prefix_never_opens_a_control_path(path):
    assert status("POST", path, AllowList(("/",))) == 403


@pytest.mark.parametrize("path", ["/collective_rpc", "/collective_rpc/", "/v1/collective_rpc", "/x%2Fcollective_rpc"])
def test_collective_rpc_is_never_proxied(path):
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


@pytest.mark.parametrize("root_path", [None, "", "/llm"])
@pytest.mark.parametrize("path", ["/v1/fine_tuning/jobs/ft-1/pause", "/v1/jobs/7/Resume/", "/v2/x/fault_tolerance/y"])
def test_what_is_a_control_path_below_no_known_root_path_passes(path, root_path):
    """The path of a later version or of a plugin, which ends in an ordinary verb."""
    assert status("POST", path, AllowList(root_path=root_path, knows_root_path=True)) == 200
    assert status("POST", path, AllowList(root_path=root_path)) == 403


def test_a_path_that_may_be_a_control_path_is_refused_as_that():
    reason = DEFAULT.decide("POST", read_path(b"/v1/fine_tuning/jobs/ft-1/pause")).reason
    assert "could be one of the engine's control paths, below a root path that is not known" in reason
    assert "set engine_root_path to vLLM's --root-path, or to / where it has none" in reason


@pytest.mark.parametrize("path", sorted(CONTROL_PATHS))
@pytest.mark.parametrize("root_path", ["/v1", "/v1/jobs/7", "/inference", "/inference/v1", "/llm"])
def test_a_known_root_path_closes_what_lies_below_it(path, root_path):
    for allow in (
        AllowList(root_path=root_path, knows_root_path=True),
        AllowList(unset_root_path=root_path, knows_root_path=True),
        AllowList((f"{root_path}/", "/"), unset_root_path=root_path, knows_root_path=True),
    ):
        assert status("POST", root_path + path, allow) == 403
        assert path.startswith(f"{root_path}/") or status("POST", path, allow) == 403


def test_a_model_may_be_called_like_a_control_path():
    assert status("GET", "/v1/models/pause") == 200


@pytest.mark.parametrize("path", ["/", "/v1", "/V1/models", "/HEALTH", "/v1x/y", "/memory", "/health/", "/%76ersion/x"])
def test_unknown_paths_are_not_found(path):
    decision = DEFAULT.decide("GET", read_path(path.encode()))
    assert decision.status == 404
    assert "proxy.extra_paths" in decision.reason


def test_an_encoded_slash_cannot_build_a_prefix():
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
    decision = AllowList(("/",)).decide("GET", read_path(path.encode("latin-1")))
    assert (decision.admitted, decision.status) == (False, 400)
    assert "malformed" in decision.reason


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "MKCOL", "QUERY", "PROPFIND", "PURGE", "M-SEARCH"])
def test_only_methods_that_an_api_has_are_proxied(method):
    decision = AllowList(("/exact",)).decide(method, read_path(b"/exact"))
    assert (decision.admitted, decision.status) == (False, 501)
    assert "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT" in decision.reason


def test_extra_entries_are_exact_unless_they_end_in_a_slash():
    allow = AllowList(("/custom/", "/exact"))
    paths = ["/custom/v1/models", "/custom/exact", "/custom/", "/custom", "/exact", "/exact/a", "/exactly"]
    assert [status("POST", path, allow) for path in paths] == [200, 200, 404, 404, 200, 404, 404]


@pytest.mark.parametrize("path", ["/custom/a", "/custom/new_control", "/custom/", "/custom/x/v1/models"])
def test_a_prefix_admits_nothing_that_the_list_refuses(path):
    """It may be the engine's root path, below which vLLM serves all its routes, those of its next version too."""
    assert status("POST", path, AllowList(("/custom/",))) == 404


def test_an_exact_entry_opens_its_path_below_a_prefix_too():
    assert status("POST", "/llm/sleep", AllowList(("/llm/", "/sleep"))) == 200


ROOTED = AllowList(root_path="/llm/prod")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/generative_scoring"])
def test_a_root_path_is_stripped_and_the_same_list_judges(path):
    assert ROOTED.decide("POST", read_path(path.encode())).route == path
    assert ROOTED.decide("POST", read_path(f"/llm/prod{path}".encode())).route == path


@pytest.mark.parametrize(
    "path",
    [
        "/llm/prod/sleep",
        "/llm/prod/new_control",
        "/llm/prod/collective_rpc",
        "/llm/prod/v1/pause",
        "/llm/prod/inference/v1/abort_requests",
        "/llm/prod/server_info",
        "/llm/prod",
        "/llm/prod/",
        "/llm/prod/llm/prod/v1/models",
        "/llm/%70rod/v1/models",
        "/llm/v1/models",
        "/sleep",
    ],
)
def test_what_the_list_refuses_is_refused_below_a_root_path(path):
    """vLLM serves every route there as well."""
    assert status("POST", path, ROOTED) in (403, 404)


def test_below_a_root_path_that_is_an_api_prefix_only_the_rest_counts():
    """With `--root-path /v1` the engine takes /v1/new_control for /new_control."""
    allow = AllowList(root_path="/v1")
    paths = ["/v1/new_control", "/v1/%6eew_control", "/v1/models", "/v1/v1/models", "/v2/rerank", "/v1/tokenize"]
    assert [status("POST", path, allow) for path in paths] == [404, 404, 404, 200, 200, 200]


def test_no_prefix_leads_around_a_root_path():
    for entries in (("/llm/",), ("/llm/prod/",), ("/llm/prod/v1/",), ("/",)):
        allow = AllowList(entries, root_path="/llm/prod")
        assert status("POST", "/llm/prod/new_control", allow) == 404
        assert status("POST", "/llm/prod/sleep", allow) == 403


def test_below_a_root_path_that_is_not_set_nothing_passes():
    allow = AllowList(unset_root_path="/v1")
    assert status("GET", "/v1/models") == 200
    decision = allow.decide("GET", read_path(b"/v1/models"))
    assert (decision.status, "engine_root_path=/v1" in decision.reason) == (403, True)
    assert status("POST", "/v1/%6eew_control", allow) == 403
    assert status("POST", "/v2/rerank", allow) == 200


def test_a_prefix_entry_says_that_a_root_path_is_meant():
    allow = AllowList(("/llm/",), unset_root_path="/llm")
    paths = ["/llm/v1/models", "/llm/new_control", "/llm/sleep", "/v1/models"]
    assert [status("POST", path, allow) for path in paths] == [200, 404, 403, 200]


@pytest.mark.parametrize("root_path", ["/llm/", "llm", "", "/a//b", "/a/../b", "/a?b", "/a%2Fb"])
def test_a_root_path_that_cannot_be_meant_has_a_flaw(root_path):
    """For readers of the list: a plain path, as vLLM would match it."""
    assert root_path_flaw(root_path)


def test_a_plain_root_path_has_none():
    assert [root_path_flaw(path) for path in ("/llm", "/llm/prod", "/v1", "/")] == [None] * 4


def test_aborting_by_name_is_refused_with_its_reason():
    assert "other clients' requests" in DEFAULT.decide("POST", read_path(b"/inference/v1/abort_requests")).reason
    assert status("POST", "/inference/v1/abort_requests", AllowList(("/inference/v1/abort_requests",))) == 200


@pytest.mark.parametrize(
    "entry", ["", "custom", "/a/../b", "//", "/a%2Fb", "/a?b", "/collective_rpc", "/x/collective_rpc"]
)
def test_an_entry_that_cannot_be_meant_is_an_error(entry):
    with pytest.raises(ValueError, match=r"proxy\.extra_paths"):
        AllowList((entry,))


# All that takes a POST outside the prefixes of the inference API and does no more than inference. The last is that of
# `vllm.entrypoints.api_server`, which has no control endpoints.
SERVING = {
    *("POST /classify", "POST /detokenize", "POST /generative_scoring", "POST /ping", "POST /pooling", "POST /rerank"),
    *("POST /score", "POST /tokenize", "POST /generate"),
}
STEERING = {
    route
    for route in recorded()
    if route.startswith("POST ") and route not in SERVING and not route.split(" ")[1].startswith(INFERENCE_PREFIXES)
} | {"POST /inference/v1/abort_requests"}
ROOT_PATHS = [None, "/llm", "/llm/prod", "/v1", "/v2", "/inference", "/cohere", "/v1/models"]


@pytest.mark.parametrize("path", sorted(route.removeprefix("POST ") for route in STEERING))
@pytest.mark.parametrize("root_path", ROOT_PATHS)
def test_what_steers_any_vllm_is_admitted_below_no_root_path(path, root_path):
    sent = (root_path or "") + path
    entries = ("/", f"{root_path or ''}/")
    unaware = (AllowList(), AllowList(entries), AllowList(root_path=root_path))
    aware = (
        AllowList(extra, set_, reported, knows_root_path=True)
        for extra in ((), entries)
        for set_, reported in ((root_path or "", None), (None, root_path))
    )
    for allow in (*unaware, *aware):
        assert status("POST", sent, allow) in (403, 404), allow


SUPERVISED = {"/ready", "/readyz"}  # of the process that starts several API servers
SERVED = sorted(set(recorded()) - STEERING - {"POST /generate"})


@pytest.mark.parametrize("route", [route for route in SERVED if not route.startswith("MOUNT ")])
def test_what_serves_in_any_vllm_is_admitted(route):
    method, path = route.replace("WEBSOCKET", "GET").replace("{response_id}", "resp_1").split(" ")
    is_open = (
        path
        not in {"/get_world_size", "/kv_event_sources", "/server_info", "/weight_info", "/fault_tolerance/status"}
        | SUPERVISED
    )
    assert (status(method, path) == 200) is is_open
    assert (status(method, f"/llm{path}", AllowList(root_path="/llm")) == 200) is is_open


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


@given(
    path=PATHS,
    method=st.sampled_from(["GET", "POST"]),
    extra=st.sampled_from([(), ("/",), ("/v1/x", "/custom/")]),
    known=st.booleans(),
)
@example(path="/v1/%2e%2e/collective_rpc", method="POST", extra=(), known=False)
@example(path="/v1/..%2fpause", method="POST", extra=("/",), known=True)
def test_no_admitted_path_resolves_to_a_denied_one(path, method, extra, known):
    if not AllowList(extra, knows_root_path=known).decide(method, read_path(path.encode("latin-1"))).admitted:
        return
    for _ in range(3):
        resolved = posixpath.normpath(path.replace("\\", "/")).lower()
        assert "/" + resolved.strip("/") not in DENIED
        assert NEVER not in resolved.split("/")
        path = unquote(path)
