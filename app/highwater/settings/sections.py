"""The sections of the settings that belong to one part each; the policy's is in ``policy/settings.py``."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, field_validator, model_validator

from highwater.policy.rules import FROZEN, Finite
from highwater.process.descriptors import room_at_most
from highwater.proxy.allowlist import AllowList
from highwater.proxy.forwarded import Mode as ForwardedMode
from highwater.proxy.limits import ProxyLimits
from highwater.settings.paths import ExistingFolder
from highwater.units import KIB, MIB

_LIMITS = ProxyLimits()


def too_many(room: int) -> str:
    return f"must be at most {room} under this process's limit of open files (ulimit -Hn)"


class ProxySettings(BaseModel):
    """The data plane."""

    model_config = FROZEN

    enabled: bool | None = Field(
        None,
        description="pass requests on to the engine; false: watch and act, and serve the control plane alone; unset: "
        "true, unless recorder_dir is set and all of engine_url, engine_root_path, engine_tls, control_port, gate and "
        "proxy are unset",
    )
    extra_paths: tuple[str, ...] = Field(
        default=(),
        description="further engine paths to proxy, as a JSON list; one that ends in / is a prefix, below which the "
        "same paths pass as without it",
    )
    max_body_bytes: int = Field(
        _LIMITS.max_body_bytes, ge=1024, description="a larger request body is answered with 413"
    )
    max_header_bytes: int = Field(
        _LIMITS.max_header_bytes, ge=8 * KIB, le=MIB, description="a larger request head is answered with 431"
    )
    connect_seconds: Finite = Field(
        _LIMITS.connect_seconds, gt=0, description="the longest that connecting to the engine may take"
    )
    first_byte_seconds: Finite = Field(
        _LIMITS.first_byte_seconds,
        ge=0,
        description="the longest wait for a response's head; one that is not streamed begins when it is complete; "
        "0: no limit",
    )
    idle_seconds: Finite = Field(
        _LIMITS.idle_seconds,
        ge=0,
        description="the longest time between two pieces of a response or an upload, or in a WebSocket; 0: no limit",
    )
    keepalive_seconds: Finite = Field(
        _LIMITS.keepalive_seconds,
        gt=0,
        le=3600,
        description="an engine connection idle for longer is closed; must be less than vLLM's "
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE (5)",
    )
    client_keepalive_seconds: Finite = Field(
        _LIMITS.client_keepalive_seconds,
        gt=0,
        le=86_400,
        description="a client connection idle for longer is closed; must exceed the keep-alive time of a load balancer "
        "in front",
    )
    max_connections: int | None = Field(
        None,
        ge=1,
        description="clients connected at once; unset: as many as the limit of open files (ulimit -n) allows",
    )
    forwarded: ForwardedMode = Field(
        "append",
        description="X-Forwarded-For, -Proto, -Host and Forwarded: append the client's connection to what it sent, "
        "replace that by it, or pass as sent",
    )

    @field_validator("max_connections")
    @classmethod
    def _within_the_limit_of_files(cls, value: int | None) -> int | None:
        room = room_at_most()
        if value is not None and value > room:
            raise ValueError(too_many(room))
        return value

    @field_validator("extra_paths")
    @classmethod
    def _admissible(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        AllowList(paths)  # raises ValueError on an entry that could never match, or that no setting may open
        return paths


class GateSettings(BaseModel):
    """Holding new requests while a reset waits for a safe moment."""

    model_config = FROZEN

    drain_seconds: Finite = Field(
        10.0,
        gt=0,
        le=600,
        description="how long a safe reset waits for requests under way to finish while new ones are held; then it is "
        "refused, and at once where a request has already taken longer",
    )
    hold_seconds: Finite = Field(30.0, gt=0, le=600, description="a request held longer is answered with 503")
    max_held: int = Field(1024, ge=0, le=100_000, description="requests held at once; one more is answered with 503")

    @model_validator(mode="after")
    def _room_for_the_reset(self) -> Self:
        if self.hold_seconds < self.drain_seconds:
            raise ValueError("hold_seconds must be at least drain_seconds: held requests wait until the reset is over")
        return self


class TrimSettings(BaseModel):
    """Moving encoder outputs to host memory."""

    model_config = FROZEN

    host_budget_bytes: int | None = Field(
        None, ge=0, description="host memory for encoder outputs, per rank; unset: half of what the host has free"
    )


class IncidentSettings(BaseModel):
    """Evidence kept when the engine dies, hangs or runs out of memory."""

    model_config = FROZEN

    folder: ExistingFolder | None = Field(
        None, description="keeps incidents as files; unset: the newest 16 in memory, until the sidecar ends"
    )
    keep: int = Field(
        32, ge=1, le=10_000, description="the most incidents that are kept; the oldest of more are removed"
    )
    max_bytes: int = Field(
        8 * MIB, ge=256 * KIB, le=64 * MIB, description="the largest incident; a larger one is thinned until it fits"
    )
