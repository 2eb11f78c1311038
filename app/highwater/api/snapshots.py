"""The routes of PyTorch's memory snapshots: take one, list them, and download each for PyTorch's viewer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Body, Depends, HTTPException, Path
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import Field
from starlette.types import Receive, Scope, Send

from highwater.api.problems import ProblemAnswer
from highwater.api.requests import NO_STORE, StrictModel
from highwater.api.services import Services
from highwater.memory.snapshots import pieces
from highwater.readings.event import Caller
from highwater.readings.schema import SCHEMA

_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}


class _Download(StreamingResponse):
    """One file, closed however the response ends: also when the client leaves in the middle."""

    def __init__(self, name: str, file: BinaryIO, size: int) -> None:
        headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}"'}
        super().__init__(pieces(file, size), media_type="application/octet-stream", headers=NO_STORE | headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


class SnapshotRequest(StrictModel):
    """The body of ``POST /memory/snapshot``; all of it may be left out."""

    dry_run: bool = False


class StacksRequest(StrictModel):
    """The body of ``POST /memory/snapshot/stacks``; all of it may be left out."""

    minutes: float = Field(10, ge=0, le=60, description="0 turns it off")
    entries: int = Field(50_000, ge=1, le=200_000, description="the newest of the history that are kept")


def snapshots_router(services: Services) -> APIRouter:
    control = Depends(services.control)
    router = APIRouter(tags=["control"], dependencies=[control])
    snapshots = services.snapshots

    @router.post(
        "/memory/snapshot",
        responses={
            501: {"model": ProblemAnswer, "description": "PyTorch keeps none of these devices"},
            507: {"model": ProblemAnswer, "description": "The folder's disk has too little room"},
        },
    )
    async def take(body: Annotated[SnapshotRequest | None, Body()] = None, caller: Caller = control) -> JSONResponse:
        """Have every worker write PyTorch's memory snapshot, or return its size. The engine is stopped meanwhile."""
        dry_run = body is not None and body.dry_run
        taken = await snapshots.take(dry_run=dry_run, caller=caller)
        ranks = [
            asdict(rank) | {"url": _url(rank.file_name) if rank.file_name in taken.here else None}
            for rank in taken.ranks
        ]
        return JSONResponse({"schema": SCHEMA, "dry_run": dry_run, "snapshot": taken.snapshot, "ranks": ranks})

    @router.post(
        "/memory/snapshot/stacks",
        responses={501: {"model": ProblemAnswer, "description": "PyTorch keeps no history of these devices"}},
    )
    async def stacks(body: Annotated[StacksRequest | None, Body()] = None, caller: Caller = control) -> JSONResponse:
        """Have PyTorch record stacks of allocations for some minutes: a snapshot taken then names the places."""
        request = body or StacksRequest()
        ranks = await snapshots.record_stacks(request.minutes, request.entries, caller=caller)
        return JSONResponse({"schema": SCHEMA, "ranks": [asdict(rank) for rank in ranks]})

    @router.get("/memory/snapshots")
    async def listed() -> JSONResponse:
        """Return the snapshot files in the folder, newest first, of every rank that writes into it."""
        files, problem = await snapshots.files.listed()
        return JSONResponse(
            {
                "schema": SCHEMA,
                "snapshots": [asdict(file) | {"url": _url(file.name)} for file in files],
                "folder": None if snapshots.files.folder is None else str(snapshots.files.folder),
                "problem": problem,
            },
            headers=NO_STORE,
        )

    @router.get("/memory/snapshots/{name}", response_class=StreamingResponse, responses={200: {"content": _BINARY}})
    async def one(name: Annotated[str, Path(description="as in the list")]) -> StreamingResponse:
        """Return one file, for https://docs.pytorch.org/memory_viz."""
        opened = await snapshots.files.open(name)
        if opened is None:
            raise HTTPException(404, "there is no snapshot of that name; GET /memory/snapshots lists them")
        return _Download(name, *opened)

    return router


def _url(name: str | None) -> str:
    return f"/memory/snapshots/{name}"
