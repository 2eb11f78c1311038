"""The control plane: the check of its callers, and the FastAPI application that responds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import ASGIApp

from gated_proxy.routes import SidecarPaths
from highwater import __version__
from highwater.http import budget, control, health, history, memory, pages
from highwater.http.access import Access, ControlGuard, DenialReason, HeadAsGet
from highwater.http.problems import PROBLEM_RESPONSES, SIDECAR_PATHS_HINT, answer_problems
from highwater.http.services import Services
from highwater.model.units import MIB
from highwater.process.admin_token import AdminToken, default_token_file
from highwater.server.settings.settings import Settings

CONTROL_BODY_BYTES = MIB
_LIVE_PATHS = frozenset({"/memory/events"})
_SIDECAR_FOLDERS = ("/dashboard/", "/docs/", "/memory/", "/policy/")
_SIDECAR_PREFIXES = ("/memory/incidents/", "/memory/snapshots/", "/dashboard/", pages.RUNBOOKS_PREFIX)

log = logging.getLogger("highwater")


def wire_access(settings: Settings, denied: Callable[[DenialReason], None]) -> tuple[AdminToken, Access]:
    if settings.admin_token is not None:
        token = AdminToken(settings.admin_token.get_secret_value(), None)
    elif settings.admin_token_file is not None:
        token = AdminToken(None, settings.admin_token_file)
    else:
        token = AdminToken(None, default_token_file(settings.control_plane_port, os.environ), is_temporary=True)
    port, trust_loopback = settings.control_plane_port, settings.trust_loopback
    return token, Access(token, port=port, trust_loopback=trust_loopback, denied=denied)


def wire_control_plane(
    services: Services, lifespan: Callable[[FastAPI], object], internal_error: Callable[[], None]
) -> tuple[ASGIApp, SidecarPaths]:
    app = FastAPI(
        title="Highwater",
        version=__version__,
        summary="Where a vLLM server's memory went, and how to get it back without failing a request.",
        openapi_url="/memory/openapi.json",  # /openapi.json and /docs are the engine's, proxied
        docs_url=None,
        redoc_url=None,
        responses=PROBLEM_RESPONSES,
        lifespan=lifespan,  # type: ignore[arg-type]
    )
    app.state.services = services
    # Probes and scrapes come first, and most often: FastAPI tries one router after the other.
    for routes in (health, memory, budget, history, control, pages):
        app.include_router(routes.router)
    answer_problems(app, internal_error)
    exact = frozenset(app.openapi()["paths"]) | {"/", "/memory/openapi.json", "/dashboard"}
    paths = SidecarPaths(exact, _SIDECAR_PREFIXES, _LIVE_PATHS, _SIDECAR_FOLDERS, SIDECAR_PATHS_HINT)
    # A HEAD is judged as the GET that it becomes.
    return HeadAsGet(ControlGuard(app, services.control, CONTROL_BODY_BYTES)), paths
