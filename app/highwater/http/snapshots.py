"""The routes of PyTorch's memory snapshots: take one, list them, and download each for PyTorch's viewer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, BinaryIO, Final

from fastapi import APIRouter, Body, HTTPException, Path, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import Field
from starlette.types import Receive, Scope, Send

from highwater.http.problems import ProblemAnswer
from highwater.http.services import NEEDS_TOKEN, NO_STORE, Admin, Parts, StrictModel, ending, wants_text
from highwater.http.text.control import snapshots_text, stacks_text, taken_text
from highwater.model.report import SCHEMA
from highwater.process.errors import OK
from highwater.watch.snapshots import pieces

_BINARY: Final = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

router = APIRouter(tags=["control"], dependencies=[NEEDS_TOKEN])


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
    if wants_text(request):
        return PlainTextResponse(taken_text(taken), headers=ending(OK))
    ranks = [
        asdict(rank) | {"url": _url(rank.file_name) if rank.file_name in taken.here else None} for rank in taken.ranks
    ]
    answer = {"schema": SCHEMA, "dry_run": dry_run, "snapshot": taken.snapshot, "ranks": ranks}
    return JSONResponse(answer, headers=ending(OK))


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
    if wants_text(request):
        return PlainTextResponse(stacks_text(ranks), headers=ending(OK))
    return JSONResponse({"schema": SCHEMA, "ranks": [asdict(rank) for rank in ranks]}, headers=ending(OK))


@router.get("/memory/snapshots")
async def listed(request: Request, parts: Parts) -> Response:
    """Return the snapshot files in the folder, newest first, of every rank that writes into it."""
    folder = parts.snapshots.files
    files, problem = await folder.listed()
    named = [(_url(file.name), file) for file in files]
    headers = NO_STORE | ending(OK)
    if wants_text(request):
        sizes = [(url, file.bytes) for url, file in named]
        return PlainTextResponse(snapshots_text(sizes, folder.folder, problem), headers=headers)
    answer = {
        "schema": SCHEMA,
        "snapshots": [asdict(file) | {"url": url} for url, file in named],
        "folder": None if folder.folder is None else str(folder.folder),
        "problem": problem,
    }
    return JSONResponse(answer, headers=headers)


@router.get(
    "/memory/snapshots/{name}",
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
