"""Routes that act: reclaim, vLLM's own resets as drop-ins, the restore after a trim, memory snapshots, the policy.

Also the engine's ``/server_info``, behind the token: it has the whole configuration, secrets included.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, BinaryIO, Final, Literal, Self

from fastapi import APIRouter, Body, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field, TypeAdapter, WrapValidator, model_validator
from starlette.types import Receive, Scope, Send

from highwater.act.relief import RemedyOutcome, RemedyRequest
from highwater.act.remedies import REMEDIES
from highwater.act.rules import PolicyChange
from highwater.diagnose.verdict import verdict
from highwater.http.problems import ProblemAnswer
from highwater.http.services import (
    NEEDS_TOKEN,
    NO_STORE,
    Admin,
    MaybeAdmin,
    Parts,
    Services,
    StrictModel,
    in_form,
)
from highwater.http.text.control import (
    policy_text,
    reclaim_text,
    restored_text,
    snapshots_text,
    stacks_text,
    taken_text,
)
from highwater.model.policy import PolicyStatus
from highwater.model.rank import RankReading
from highwater.model.remedies import Mode, RemedyResult, Target
from highwater.model.report import SCHEMA, Event
from highwater.process.errors import FAILED, OK, EngineError, NotAvailable, Refused, UnknownKey
from highwater.process.untrusted import parse_json
from highwater.watch.snapshots import pieces

_RANKS: Final = TypeAdapter(tuple[RankReading, ...])
_RESULT: Final = TypeAdapter(RemedyResult)
_STATUS: Final = TypeAdapter(PolicyStatus)
_EVENTS: Final = TypeAdapter(list[Event])
# Taken off the query string of the drop-in paths; what vLLM takes there goes on unchanged.
_OWN_PARAMETERS: Final = ("mode", "force")
_BINARY: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
DECISIONS_SHOWN: Final = 20

router = APIRouter(tags=["control"])


def _engines(*parameters: str) -> dict[str, Any]:
    """Return what a route says of the query's keys that it passes on: vLLM judges their values."""
    return {"parameters": [{"name": name, "in": "query", "schema": {"type": "string"}} for name in parameters]}


class TrimRequest(StrictModel):
    """A trim and its target on every rank. Without a target it moves all that no running request still needs."""

    remedy: Literal["trim_encoder_cache"]
    free_bytes: int | None = Field(None, ge=0, strict=True, description="device bytes to let go")
    keep_bytes: int | None = Field(
        None, ge=0, strict=True, description="device bytes of encoder outputs to keep at most"
    )
    idle_seconds: float | None = Field(
        None, ge=0, strict=True, allow_inf_nan=False, description="let go what was not used so long"
    )

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        given = [name for name in ("free_bytes", "keep_bytes", "idle_seconds") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"one target at most; given: {', '.join(given)}")
        return self

    def request(self) -> RemedyRequest:
        return RemedyRequest(self.remedy, Target(**self.model_dump(exclude={"remedy"})))


def _entry(value: object, _: object) -> str | TrimRequest:
    """Judge by the kind alone: a union would say of a wrong target also that it is no text."""
    return value if isinstance(value, str) else TrimRequest.model_validate(value)


class ReclaimRequest(StrictModel):
    """The body of ``POST /memory/reclaim``; all of it may be left out."""

    remedies: list[Annotated[str | TrimRequest, WrapValidator(_entry)]] | None = Field(
        None,
        min_length=1,
        max_length=16,
        description="names, in this order, each once; trim_encoder_cache also as an object with its target. Not given: "
        "release, and then reset_encoder_cache, or trim_encoder_cache on an engine without that",
    )
    mode: Mode = "safe"
    dry_run: bool = False

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        names = [each.remedy for each in self.requests()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"each remedy at most once; given more than once: {twice}")
        return self

    def requests(self) -> list[RemedyRequest]:
        return [RemedyRequest(entry) if isinstance(entry, str) else entry.request() for entry in self.remedies or ()]


class ReclaimQuery(StrictModel):
    dry_run: bool = Field(False, description="as in the body, and without the token")


@router.post(
    "/memory/reclaim",
    responses={409: {"description": "Every remedy was refused; the body is as with 200"}},
)
async def reclaim(
    request: Request,
    parts: Parts,
    admitted: MaybeAdmin,
    query: Annotated[ReclaimQuery, Query()],
    body: Annotated[ReclaimRequest | None, Body()] = None,
) -> Response:
    """Run remedies in order and return what each gave back, per rank.

    A dry run returns what each could give back by the last report, and calls no worker; with `?dry_run=true` it needs
    no token either.
    """
    wanted = body or ReclaimRequest()
    is_dry = query.dry_run or wanted.dry_run
    caller = None if is_dry else admitted()
    try:
        results = await parts.relief.reclaim(wanted.requests(), mode=wanted.mode, dry_run=is_dry, caller=caller)
    except NotAvailable as exc:
        if (report := parts.report()).engine.traits.is_up:
            raise
        raise NotAvailable(verdict(report).with_step) from exc
    outcomes = {each.result.outcome for each in results}
    status = 409 if outcomes == {"refused"} and not is_dry else 200
    ends_with = FAILED if not results or outcomes & {"refused", "failed"} else OK

    def told() -> dict[str, Any]:
        shown = [_shown(each) if is_dry else _with_ranks(each) for each in results]
        return {"mode": wanted.mode, "dry_run": is_dry, "results": shown}

    return in_form(request, lambda: reclaim_text(results, dry_run=is_dry), told, ends_with=ends_with, status=status)


class RestoreRequest(StrictModel):
    """The body of ``POST /memory/encoder-cache/restore``: it takes no key, and restores every rank."""


@router.post("/memory/encoder-cache/restore")
async def restore(
    request: Request, parts: Parts, caller: Admin, body: Annotated[RestoreRequest | None, Body()] = None
) -> Response:
    """Bring every encoder output that a trim moved to host memory back to the device."""
    del body
    ranks = await parts.relief.restore(caller=caller)
    return in_form(request, lambda: restored_text(ranks), lambda: {"ranks": ranks})


@router.get(
    "/server_info",
    dependencies=[NEEDS_TOKEN],
    responses={200: {"content": {"application/json": {}}}},
    openapi_extra=_engines("config_format"),
)
async def server_info(request: Request, parts: Parts) -> Response:
    """Return the engine's configuration as vLLM's development mode does, tokens included."""
    try:
        answer = await parts.server_info(request.scope["query_string"].decode("latin-1"))
    except EngineError as exc:
        raise NotAvailable(str(exc)) from exc
    return Response(answer.body, answer.status, media_type=answer.content_type or None, headers=NO_STORE)


async def drop_in(
    request: Request, parts: Parts, caller: Admin, mode: Mode = "now", force: bool = False
) -> JSONResponse:
    """Call vLLM's own reset, query string included; the response is vLLM's and what the reset gave back."""
    # vLLM reads no body here, and some clients send one: nothing but what would be ours is refused in it.
    if ours := {*_OWN_PARAMETERS, "dry_run"} & await _body_keys(request):
        raise UnknownKey(
            f"{', '.join(sorted(ours))}: vLLM's resets read no body; send ?mode= and ?force= in the query, or a dry "
            "run to POST /memory/reclaim?dry_run=true"
        )
    if mode == "safe" and "reset_running_requests" in request.query_params:
        # It preempts running requests, and up to 0.21 each may lose a token by it.
        raise Refused("mode=safe never preempts running requests: leave reset_running_requests out")
    pairs = request.scope["query_string"].decode("latin-1").split("&")
    query = "&".join(pair for pair in pairs if pair and pair.partition("=")[0] not in _OWN_PARAMETERS)
    name = request.scope["route"].name
    outcome = await parts.relief.drop_in(name, query=query, mode=mode, force=force, caller=caller)
    if outcome.answer is None:  # the engine stopped before it responded
        return JSONResponse({"schema": SCHEMA, **_with_ranks(outcome)}, 503)
    body = outcome.answer.json_object() | {"schema": SCHEMA} | _with_ranks(outcome)
    return JSONResponse(body, outcome.answer.status)


for remedy in REMEDIES:
    if remedy.path is not None:
        router.post(
            remedy.path,
            name=remedy.name,
            responses={503: {"description": "The engine is not reachable, or stopped during the reset"}},
            openapi_extra=_engines(*remedy.parameters),
        )(drop_in)


async def _body_keys(request: Request) -> set[str]:
    try:
        body = parse_json((await request.body()).decode())
    except ValueError:  # it may hold anything, or nothing
        return set()
    return set(body) if isinstance(body, dict) else set()


def _shown(outcome: RemedyOutcome) -> dict[str, Any]:
    shown: dict[str, Any] = _RESULT.dump_python(outcome.result, mode="json")
    freed, credited = ({"total": shown.pop(f"{name}_bytes")} for name in ("freed", "credited"))
    freed |= {"components": shown.pop("freed_components"), "ranks": shown.pop("ranks")}
    credited |= {"components": shown.pop("credited_components")}
    for name in ("seconds", "held_seconds"):
        shown[name] = None if shown[name] is None else round(shown[name], 3)
    return shown | {"freed_bytes": freed, "credited_bytes": credited}


def _with_ranks(outcome: RemedyOutcome) -> dict[str, Any]:
    ranks = {"before": outcome.before, "after": outcome.after}
    return _shown(outcome) | {name: _RANKS.dump_python(readings, mode="json") for name, readings in ranks.items()}


# --- PyTorch's memory snapshots ---


class SnapshotRequest(StrictModel):
    """The body of ``POST /memory/snapshot``; all of it may be left out."""

    dry_run: bool = False


class StacksRequest(StrictModel):
    """The body of ``POST /memory/snapshot/stacks``; all of it may be left out."""

    minutes: float = Field(10, ge=0, le=60, description="0 turns it off")
    entries: int = Field(50_000, ge=1, le=200_000, description="the newest of the history that are kept")


@router.post(
    "/memory/snapshot",
    responses={
        501: {"model": ProblemAnswer, "description": "PyTorch keeps none of these devices"},
        507: {"model": ProblemAnswer, "description": "The folder's disk has too little room"},
    },
)
async def take(
    request: Request, parts: Parts, caller: Admin, body: Annotated[SnapshotRequest | None, Body()] = None
) -> Response:
    """Have every worker write PyTorch's memory snapshot, or return its size. The engine is stopped meanwhile."""
    dry_run = body is not None and body.dry_run
    taken = await parts.snapshots.take(dry_run=dry_run, caller=caller)
    ranks = [
        asdict(rank) | {"url": _url(rank.file_name) if rank.file_name in taken.here else None} for rank in taken.ranks
    ]
    answer = {"dry_run": dry_run, "snapshot": taken.snapshot, "ranks": ranks}
    return in_form(request, lambda: taken_text(taken), lambda: answer)


@router.post(
    "/memory/snapshot/stacks",
    responses={501: {"model": ProblemAnswer, "description": "PyTorch keeps no history of these devices"}},
)
async def stacks(
    request: Request, parts: Parts, caller: Admin, body: Annotated[StacksRequest | None, Body()] = None
) -> Response:
    """Have PyTorch record stacks of allocations for some minutes: a snapshot taken then names the places."""
    wanted = body or StacksRequest()
    ranks = await parts.snapshots.record_stacks(wanted.minutes, wanted.entries, caller=caller)
    return in_form(request, lambda: stacks_text(ranks), lambda: {"ranks": list(map(asdict, ranks))})


@router.get("/memory/snapshots", dependencies=[NEEDS_TOKEN])
async def listed(request: Request, parts: Parts) -> Response:
    """Return the snapshot files in the folder, newest first, of every rank that writes into it."""
    folder = parts.snapshots.files
    files, problem = await folder.listed()
    named = [(_url(file.name), file) for file in files]
    answer = {
        "snapshots": [asdict(file) | {"url": url} for url, file in named],
        "folder": None if folder.folder is None else str(folder.folder),
        "problem": problem,
    }
    sizes = [(url, file.bytes) for url, file in named]
    return in_form(request, lambda: snapshots_text(sizes, folder.folder, problem), lambda: answer, headers=NO_STORE)


@router.get(
    "/memory/snapshots/{name}",
    dependencies=[NEEDS_TOKEN],
    response_class=StreamingResponse,
    responses={200: {"content": _BINARY}},
)
async def one(parts: Parts, name: Annotated[str, Path(description="as in the list")]) -> StreamingResponse:
    """Return one file, for https://docs.pytorch.org/memory_viz."""
    opened = await parts.snapshots.files.open(name)
    if opened is None:
        raise HTTPException(404, "there is no snapshot of that name; GET /memory/snapshots lists them")
    return _Download(name, *opened)


class _Download(StreamingResponse):
    """One file, closed however the response ends: also when the client leaves in the middle."""

    def __init__(self, name: str, file: BinaryIO, size: int) -> None:
        headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}"'}
        super().__init__(pieces(file, size), media_type="application/octet-stream", headers=NO_STORE | headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


def _url(name: str | None) -> str:
    return f"/memory/snapshots/{name}"


# --- the policy ---


@router.get("/policy")
async def policy(request: Request, parts: Parts) -> Response:
    """Return the rules, where they come from, their state, the last decisions, and whether the caller may act."""
    return _policy(request, parts, caller=parts.control.outcome(request))


@router.put(
    "/policy",
    responses={507: {"model": ProblemAnswer, "description": "The state file could not be written; all is as before"}},
)
async def change_policy(request: Request, parts: Parts, change: PolicyChange, caller: Admin) -> Response:
    """Replace the mode, the rules or both; validated whole, kept, and recorded.

    A rule whose waters this engine is known to be unable to reach at rest is refused.
    """
    parts.governor.check(change.rules or ())
    changed = await parts.policy.change(change)
    named = ", ".join(rule.name for rule in changed.rules) or "none"
    kept = f"kept in {parts.policy.kept_in}" if parts.policy.kept_in else "until the next restart"
    until = "as configured" if parts.policy.source == "settings" else kept
    summary = f"policy changed: mode {changed.mode}, rules {named}; {until}"
    parts.governor.replace_policy(changed.rules, changed.mode, summary, caller=caller)
    parts.exporter.counters.policy_changed()
    return _policy(request, parts)


def _policy(request: Request, services: Services, **more: str) -> Response:
    governor, store, status = services.governor, services.policy, services.governor.status()
    decisions = [event for event in services.history.events() if event.kind == "policy" or event.trigger == "policy"]
    decisions = decisions[:DECISIONS_SHOWN]
    answer: dict[str, Any] = {
        "mode": governor.mode,
        "rules": [rule.model_dump(mode="json") | {"remedies": rule.ordered_remedies} for rule in governor.rules],
        "source": store.source,
        "kept": store.kept_in is not None,
        "kept_in": store.kept_in,
        "status": _STATUS.dump_python(status, mode="json"),
        "last_decisions": _EVENTS.dump_python(decisions, mode="json"),
    }
    return in_form(request, lambda: policy_text(status, governor.rules, store, decisions), lambda: answer | more)
