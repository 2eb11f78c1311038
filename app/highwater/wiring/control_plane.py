"""The control plane: the check of its callers, and the FastAPI application that responds."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from fastapi import FastAPI
from starlette.types import ASGIApp

from gated_proxy.routes import SidecarPaths
from highwater import __version__
from highwater.api.access import Access, ControlGuard, DenialReason
from highwater.api.budget import budget_router
from highwater.api.control import control_router
from highwater.api.dashboard import dashboard_router
from highwater.api.encoder_cache import encoder_cache_router
from highwater.api.findings import findings_router
from highwater.api.growth import growth_router
from highwater.api.health import health_router
from highwater.api.history import history_router
from highwater.api.host import host_router
from highwater.api.incidents import incidents_router
from highwater.api.memory import memory_router
from highwater.api.middleware import HeadAsGet
from highwater.api.plan import plan_router
from highwater.api.policy import policy_router
from highwater.api.problems import PROBLEM_RESPONSES, SIDECAR_PATHS_HINT, answer_problems
from highwater.api.runbooks import PREFIX as RUNBOOKS_PREFIX
from highwater.api.runbooks import runbooks_router
from highwater.api.services import Services
from highwater.api.snapshots import snapshots_router
from highwater.files.admin_token import AdminToken, default_token_file
from highwater.settings.settings import Settings
from highwater.units import MIB

CONTROL_BODY_BYTES = MIB
_LIVE_PATHS = frozenset({"/memory/events"})
_SIDECAR_FOLDERS = ("/dashboard/", "/docs/", "/memory/", "/policy/")
_SIDECAR_PREFIXES = ("/memory/incidents/", "/memory/snapshots/", "/dashboard/", RUNBOOKS_PREFIX)

log = logging.getLogger("highwater")


def wire_access(settings: Settings, denied: Callable[[DenialReason], None]) -> tuple[AdminToken, Access]:
    if settings.admin_token is not None:
        token = AdminToken(settings.admin_token.get_secret_value(), None)
    elif settings.admin_token_file is not None:
        token = AdminToken(None, settings.admin_token_file)
    else:
        token = AdminToken(None, default_token_file(settings.control_plane_port, os.environ), is_temporary=True)
    if settings.trust_loopback:
        log.info("control calls from this machine's own addresses need no token (trust_loopback)")
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
    readers = (
        memory_router,
        growth_router,
        findings_router,
        budget_router,
        plan_router,
        encoder_cache_router,
        host_router,
        history_router,
    )
    # Probes and scrapes come first, and most often: FastAPI tries one router after the other.
    for router in (health_router, *readers, control_router, snapshots_router, policy_router):
        app.include_router(router(services))
    app.include_router(incidents_router(services.incidents))
    app.include_router(dashboard_router())
    app.include_router(runbooks_router())
    answer_problems(app, internal_error)
    exact = frozenset(app.openapi()["paths"]) | {"/", "/memory/openapi.json", "/dashboard"}
    paths = SidecarPaths(exact, _SIDECAR_PREFIXES, _LIVE_PATHS, _SIDECAR_FOLDERS, SIDECAR_PATHS_HINT)
    # A HEAD is judged as the GET that it becomes.
    return HeadAsGet(ControlGuard(app, services.control, CONTROL_BODY_BYTES)), paths
