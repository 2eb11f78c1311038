"""The sections of the settings that belong to one part each; the policy's is in ``act/rules.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator, model_validator

from gated_proxy.allowlist import SETTING, extra_path_flaw
from gated_proxy.door import Mode as DoorMode
from gated_proxy.door_items import DoorLimits
from gated_proxy.heads import Mode as ForwardedMode
from gated_proxy.proxy import ProxyLimits
from highwater.act.rules import Finite
from highwater.model.units import KIB, MIB
from highwater.process.errors import os_reason
from highwater.process.resources import room_at_most
from highwater.process.tls import TlsFiles, check_certificate, check_pair
from highwater.process.untrusted import masked

_LIMITS, _DOOR = ProxyLimits(), DoorLimits()


# Each path is absolute: the sidecar's working directory means nothing to others.
def check_path(path: Path, is_valid: Callable[[Path], bool], needed: str) -> Path:
    try:
        is_right = path.is_absolute() and is_valid(path)
    except OSError as exc:  # a folder on the way that cannot be searched, a name that is too long
        raise ValueError(f"cannot be looked at: {os_reason(exc)}") from exc
    if not is_right:
        raise ValueError(f"must be {needed}")
    return path


def is_file_in_folder(path: Path) -> bool:
    return path.parent.is_dir() and not path.is_dir()


def _absolute(what: str, is_valid: Callable[[Path], bool]) -> AfterValidator:
    return AfterValidator(lambda path: check_path(path, is_valid, f"the absolute path of {what}"))


ExistingFolder: TypeAlias = Annotated[Path, _absolute("a folder that exists", Path.is_dir)]
Folder: TypeAlias = Annotated[Path, _absolute("a folder", lambda path: path.is_dir() or not path.exists())]
File: TypeAlias = Annotated[Path, _absolute("a file", lambda path: not path.is_dir())]
FileInFolder: TypeAlias = Annotated[Path, _absolute("a file in a folder that exists", is_file_in_folder)]


def too_many(room: int) -> str:
    return f"must be at most {room} under this process's limit of open files (ulimit -Hn)"


class ProxySettings(BaseModel, frozen=True, extra="forbid"):
    """The data plane."""

    enabled: bool | None = Field(
        None,
        description="pass requests on to the engine; false: only watch, act and serve the control plane; unset: "
        "true, unless recorder_dir is set and all of engine_url, engine_root_path, engine_tls, control_port, gate, "
        "door and proxy are unset",
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
        description="clients connected at once; unset: about half the limit of open files (ulimit -n), at most 16,384",
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
        for path in paths:
            if flaw := extra_path_flaw(path):
                raise ValueError(f"{SETTING}: {masked(path)!r}: {flaw}")
        return paths


class GateSettings(BaseModel, frozen=True, extra="forbid"):
    """Holding new requests while a reset waits for a safe moment."""

    drain_seconds: Finite = Field(
        10.0,
        gt=0,
        le=600,
        description="how long a safe reset waits for running requests while new ones are held; then it is refused",
    )
    hold_seconds: Finite = Field(30.0, gt=0, le=600, description="a request held longer is answered with 503")
    max_held: int = Field(1024, ge=0, le=100_000, description="requests held at once; one more is answered with 503")

    @model_validator(mode="after")
    def _room_for_the_reset(self) -> Self:
        if self.hold_seconds < self.drain_seconds:
            raise ValueError("hold_seconds must be at least drain_seconds: held requests wait until the reset is over")
        return self


class DoorSettings(BaseModel, frozen=True, extra="forbid"):
    """Admitting the images and videos of requests by what they will cost the engine."""

    mode: DoorMode | None = Field(
        None,
        description="on: requests whose images have no room wait, or are refused; observe: they are only counted; off: "
        "bodies are not looked at; unset: on where the engine's container has a memory limit or the engine does not "
        "profile its encoder, else observe",
    )
    wait_seconds: Finite = Field(
        _DOOR.wait_seconds, ge=0, le=600, description="a request whose images wait longer for room is answered with 503"
    )
    decoded_bytes: int | None = Field(
        None,
        ge=1,
        description="images and videos in flight, in bytes once decoded; a request with more is answered with 413; "
        "unset: an eighth of the host memory that the engine's container can still take, and 413 from an eighth of its "
        "limit on",
    )
    encoder_tokens: int | None = Field(
        None,
        ge=1,
        description="images and videos in flight, in encoder tokens; unset: twice what the encoder cache holds, and "
        "where the engine does not profile its encoder no more than the device has memory for",
    )
    items: int | None = Field(1024, ge=1, description="images and videos in flight")
    unknown_bytes: int = Field(
        _DOOR.unknown_bytes,
        ge=1,
        description="what an image or video of unknown size, such as one behind a URL, counts as once decoded",
    )
    max_waiting: int = Field(
        _DOOR.max_waiting,
        ge=0,
        le=100_000,
        description="requests that wait for room at once; one more is answered with 503",
    )


class TrimSettings(BaseModel, frozen=True, extra="forbid"):
    """Moving encoder outputs to host memory."""

    host_budget_bytes: int | None = Field(
        None,
        ge=0,
        description="host memory for encoder outputs, per rank; unset: half of what the host has free, shared among "
        "ranks",
    )


class IncidentSettings(BaseModel, frozen=True, extra="forbid"):
    """Evidence kept when the engine dies, hangs or runs out of memory."""

    folder: ExistingFolder | None = Field(
        None, description="keeps incidents as files; unset: the newest 16 in memory, until the sidecar ends"
    )
    keep: int = Field(
        32, ge=1, le=10_000, description="the most incidents that are kept; the oldest of more are removed"
    )
    max_bytes: int = Field(
        8 * MIB, ge=256 * KIB, le=64 * MIB, description="the largest incident; a larger one is thinned until it fits"
    )


class _KeyPair(BaseModel, frozen=True, extra="forbid"):
    """A certificate and its key: both or neither, and they must load."""

    cert_file: Path | None
    key_file: Path | None

    @field_validator("cert_file", "ca_file", check_fields=False)
    @classmethod
    def _certificates(cls, value: Path | None) -> Path | None:
        if value is not None:
            check_certificate(value)
        return value

    @field_validator("key_file")
    @classmethod
    def _of_the_certificate(cls, key_file: Path | None, info: ValidationInfo) -> Path | None:
        if "cert_file" not in info.data:  # it is invalid, and reported already
            return key_file
        cert_file: Path | None = info.data["cert_file"]
        if cert_file is None and key_file is not None:
            raise ValueError("is a key without a certificate: cert_file must be given too")
        if cert_file is not None and key_file is None:
            raise ValueError(f"must be given too: the key of cert_file ({cert_file})")
        if cert_file is not None and key_file is not None:
            try:
                check_pair(cert_file, key_file)
            except ValueError as exc:
                raise ValueError(f"does not serve: {exc}") from exc
        return key_file


class TlsSettings(_KeyPair):
    """TLS towards clients."""

    cert_file: Path | None = Field(None, description="certificate chain to serve TLS with, PEM; unset: plain HTTP")
    key_file: Path | None = Field(None, validate_default=True, description="the key of cert_file, PEM, not encrypted")

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(cert_file=self.cert_file, key_file=self.key_file)


class EngineTlsSettings(_KeyPair):
    """TLS towards an engine at an https URL."""

    ca_file: Path | None = Field(
        None,
        description="authorities trusted for the engine's certificate, PEM; unset: the system's",
    )
    cert_file: Path | None = Field(None, description="certificate chain to present to the engine, PEM")
    key_file: Path | None = Field(None, validate_default=True, description="the key of cert_file, PEM, not encrypted")

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(self.ca_file, self.cert_file, self.key_file)
