"""The settings: type, default, unit and meaning of each, in one frozen object. ``settings_sources`` fills it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, SecretStr, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from highwater.files.admin_token import MIN_LENGTH, is_loopback, is_strong_enough
from highwater.files.tls import TlsFiles, check_certificate, check_pair
from highwater.policy.rules import FROZEN, Finite
from highwater.policy.settings import PolicySettings
from highwater.process.descriptors import room_at_most
from highwater.process.log_format import LogFormat
from highwater.proxy.access_log import STANDARD_OUTPUT
from highwater.proxy.allowlist import AllowList, root_path_flaw
from highwater.proxy.forwarded import Mode as ForwardedMode
from highwater.proxy.limits import ProxyLimits
from highwater.units import KIB, MIB

PREFIX = "HIGHWATER_"
# Records of 2 KiB in one recorder's file, beside less than 1 MiB of other areas; its reader takes no more than 64 MiB
# (docs/recorder.md).
MAX_RECORDS = 32_000

_LIMITS = ProxyLimits()
_DEFAULT_PORTS = {"http": 80, "https": 443}
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to
# Settings about requests for the engine: with one of them set, requests are passed on.
_ABOUT_REQUESTS = frozenset({"engine_url", "engine_root_path", "engine_tls", "control_port", "gate", "proxy"})


def _absolute(what: str, is_valid: Callable[[Path], bool]) -> AfterValidator:
    def check(path: Path) -> Path:
        if not (path.is_absolute() and is_valid(path)):
            raise ValueError(f"must be the absolute path of {what}")
        return path

    return AfterValidator(check)


_ExistingFolder: TypeAlias = Annotated[Path, _absolute("a folder that exists", Path.is_dir)]
_Folder: TypeAlias = Annotated[Path, _absolute("a folder", lambda path: path.is_dir() or not path.exists())]
_File: TypeAlias = Annotated[Path, _absolute("a file", lambda path: not path.is_dir())]
_FileInFolder: TypeAlias = Annotated[
    Path,
    _absolute("a file in a folder that exists", lambda path: path.parent.is_dir() and not path.is_dir()),
]


def _too_many(room: int) -> str:
    return f"must be at most {room} under this process's limit of open files (ulimit -Hn)"


def _leads_to(url: str, host: str, port: int | None) -> bool:
    """Return whether an engine's URL names the address that is listened on, as far as names alone show."""
    parts = urlsplit(url)
    if parts.scheme == "unix" or (parts.port or _DEFAULT_PORTS.get(parts.scheme)) != port:
        return False
    name = parts.hostname or ""
    if name == host.strip("[]").lower():
        return True
    if host in _EVERYWHERE:
        return is_loopback(name) or name in _EVERYWHERE
    return "localhost" in (name, host) and is_loopback(name) and is_loopback(host)


class ProxySettings(BaseModel):
    """The data plane."""

    model_config = FROZEN

    enabled: bool | None = Field(
        None,
        description="pass requests on to the engine; false: watch and act, and serve the control plane alone; unset: "
        "true, unless recorder_dir is set and none of engine_url, engine_root_path, engine_tls, control_port, gate and "
        "proxy",
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
            raise ValueError(_too_many(room))
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

    folder: _ExistingFolder | None = Field(
        None, description="keeps incidents as files; unset: the newest 16 in memory, until the sidecar ends"
    )
    keep: int = Field(
        32, ge=1, le=10_000, description="the most incidents that are kept; the oldest of more are removed"
    )
    max_bytes: int = Field(
        8 * MIB, ge=256 * KIB, le=64 * MIB, description="the largest incident; a larger one is thinned until it fits"
    )


class _KeyPair(BaseModel):
    """A certificate and its key: both or neither, and they must load."""

    model_config = FROZEN

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

    cert_file: Path | None = Field(
        None, description="certificate chain to serve TLS with, PEM, read again when it changes; unset: plain HTTP"
    )
    key_file: Path | None = Field(None, validate_default=True, description="the key of cert_file, PEM, not encrypted")

    @property
    def files(self) -> TlsFiles:
        """The files, as the TLS contexts take them."""
        return TlsFiles(cert_file=self.cert_file, key_file=self.key_file)


class EngineTlsSettings(_KeyPair):
    """TLS towards an engine at an https URL."""

    ca_file: Path | None = Field(
        None,
        description="authorities trusted for the engine's certificate, PEM, read again when it changes; unset: the "
        "system's",
    )
    cert_file: Path | None = Field(
        None, description="certificate chain to present to the engine, PEM, read again when it changes"
    )
    key_file: Path | None = Field(None, validate_default=True, description="the key of cert_file, PEM, not encrypted")

    @property
    def files(self) -> TlsFiles:
        """The files, as the TLS contexts take them."""
        return TlsFiles(self.ca_file, self.cert_file, self.key_file)


class Settings(BaseModel):
    """All settings of ``highwater serve``."""

    model_config = FROZEN

    engine_url: str = Field("http://127.0.0.1:8000", description="the vLLM server: http, https or unix:/path")
    engine_root_path: str | None = Field(
        None,
        description="the root path that vLLM was started with: below it the same paths are proxied as without it",
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8001, ge=1, le=65535, validate_default=True, description="port to listen on")
    control_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port for the control plane, metrics and probes alone; port then serves what the engine serves and "
        "nothing else; unset: port serves both",
    )
    admin_token: SecretStr | None = Field(
        None, description="control calls must carry it; unset: the token in admin_token_file"
    )
    admin_token_file: _File | None = Field(
        None,
        description="holds the token, for its owner alone; made where it is missing, read again when it changes; "
        "unset: highwater/PORT.token in $XDG_STATE_HOME (~/.local/state), made at start",
    )
    trust_loopback: bool = Field(
        False, description="callers from a loopback address need no token; a reverse proxy on this machine is one"
    )
    poll_seconds: Finite = Field(1.0, ge=0.1, le=3600, description="time between polls")
    idle_poll_seconds: Finite = Field(
        5.0, ge=0.1, le=3600, description="time between calls to an idle engine's workers"
    )
    rpc_deadline_seconds: Finite = Field(
        8.0, gt=0, le=600, description="a worker call that takes longer counts as late"
    )
    history_seconds: Finite = Field(3600.0, ge=60, le=86400, description="how far back the history reaches")
    engine_has_extension: bool = Field(
        False, description="the engine's worker extension is a subclass of Highwater's under another name"
    )
    # It need not exist yet: the workers make it, and the sidecar may start first.
    recorder_dir: _Folder | None = Field(
        None,
        description="folder shared with the workers, under the same path, for recorders and snapshots; unset: disabled",
    )
    recorder_rate: Finite = Field(10.0, ge=1, le=100, description="samples a second that each worker records")
    recorder_seconds: Finite = Field(120.0, ge=10, le=3600, description="how long each worker's recorder reaches back")
    max_step_seconds: Finite = Field(
        120.0,
        gt=0,
        le=86_400,
        description="a worker in one step for longer is stuck; before that it is busy (needs recorder_dir; "
        "without it, an engine that answers no call for that long is not ready)",
    )
    engine_log: _File | None = Field(
        None, description="the engine's log, whose known messages an incident explains; unset: disabled"
    )
    shutdown_seconds: Finite = Field(
        30.0, ge=0, le=3600, description="how long streams may go on after the signal to stop"
    )
    state_file: _FileInFolder | None = Field(
        None, description="keeps PUT /policy across restarts, and idle floors in a file beside it; unset: disabled"
    )
    access_log: str | None = Field(
        None,
        description="writes a JSON line for each request that ended: `-` for standard output, or a file's absolute "
        "path; unset: disabled",
        json_schema_extra={"pattern": "^(-$|/)"},
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="the lowest level in the sidecar's own log"
    )
    log_format: LogFormat = Field(
        "text", description="format of the sidecar's own log, on standard error: text, or one JSON object a line"
    )
    policy: PolicySettings = PolicySettings()
    gate: GateSettings = GateSettings()
    trim: TrimSettings = TrimSettings()
    incidents: IncidentSettings = IncidentSettings()
    proxy: ProxySettings = ProxySettings()
    tls: TlsSettings = TlsSettings()
    engine_tls: EngineTlsSettings = EngineTlsSettings()

    @field_validator("engine_url")
    @classmethod
    def _reachable_url(cls, value: str) -> str:
        if value.startswith("unix:"):
            if not value.removeprefix("unix:").startswith("/"):
                raise ValueError("must be unix: and an absolute path, such as unix:/run/vllm.sock")
            return value
        parts = urlsplit(value)
        try:
            port_ok = parts.port is None or parts.port > 0
        except ValueError:
            port_ok = False
        if parts.scheme not in {"http", "https"} or not parts.hostname or not port_ok:
            raise ValueError("must be http://HOST:PORT, https://HOST:PORT or unix:/PATH")
        if parts.path not in {"", "/"} or parts.query or parts.fragment or "@" in parts.netloc:
            raise ValueError("must have no path, query, fragment or credentials")
        return value.rstrip("/")

    @field_validator("engine_root_path")
    @classmethod
    def _well_formed_root_path(cls, value: str | None) -> str | None:
        flaw = None if value is None else root_path_flaw(value)
        if flaw:
            raise ValueError(flaw)
        return value

    @field_validator("access_log")
    @classmethod
    def _writable(cls, value: str | None) -> str | None:
        if value is None or value == STANDARD_OUTPUT:
            return value
        path = Path(value)
        if not path.is_absolute() or path.is_dir() or not path.parent.is_dir():
            raise ValueError("must be - or the absolute path of a file in a folder that exists")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError("must be a file that can be written, and this process may not")
        return value

    @field_validator("recorder_seconds")
    @classmethod
    def _fits_recorder_file(cls, value: float, info: ValidationInfo) -> float:
        rate = info.data.get("recorder_rate", 0.0)  # a wrong one is reported already
        if (rate + 1) * value > MAX_RECORDS:
            most = int(MAX_RECORDS / (rate + 1))
            raise ValueError(
                f"must be at most {most} at {rate:g} samples a second: a recorder's file has 64 MiB at most"
            )
        return value

    @field_validator("engine_tls")
    @classmethod
    def _needs_https(cls, value: EngineTlsSettings, info: ValidationInfo) -> EngineTlsSettings:
        url = info.data.get("engine_url", "https:")  # a wrong one is reported already
        if any(value.files) and not url.startswith("https:"):
            raise ValueError(f"is for an https engine_url, and engine_url is {url!r}")
        return value

    @field_validator("admin_token")
    @classmethod
    def _strong_enough(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not is_strong_enough(value.get_secret_value()):
            raise ValueError(f"must be at least {MIN_LENGTH} printable ASCII characters without spaces")
        return value

    @field_validator("admin_token_file")
    @classmethod
    def _only_without_token(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("admin_token") is not None:
            raise ValueError("admin_token is set too; set one of the two")
        return value

    @field_validator("port", "control_port", mode="before")
    @classmethod
    def _not_a_service_link(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str) and value.startswith("tcp://"):
            service = "highwater" if info.field_name == "port" else "highwater-control"
            raise ValueError(
                f"was written by Kubernetes for a Service called {service}; set enableServiceLinks: false in the pod"
            )
        return value

    @field_validator("port", "control_port")
    @classmethod
    def _not_the_engines_port(cls, value: int | None, info: ValidationInfo) -> int | None:
        engine_url, host = info.data.get("engine_url"), info.data.get("host")  # a wrong one is reported already
        if engine_url is not None and host is not None and _leads_to(engine_url, host, value):
            raise ValueError(
                f"is where engine_url ({engine_url}) leads: the sidecar would pass requests on to itself; set "
                "engine_url to vLLM's own address, or this to another port"
            )
        return value

    @field_validator("control_port")
    @classmethod
    def _differs_from_port(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value == info.data.get("port"):
            raise ValueError(f"must differ from port ({value}); unset: port serves both planes")
        return value

    @field_validator("proxy")
    @classmethod
    def _leaves_files_to_the_control_port(cls, value: ProxySettings, info: ValidationInfo) -> ProxySettings:
        room = room_at_most(has_control_port=info.data.get("control_port") is not None)
        if value.max_connections is not None and value.max_connections > room:
            raise ValueError(f"max_connections ({value.max_connections}) {_too_many(room)}, with a control_port")
        return value

    @property
    def has_data_plane(self) -> bool:
        """True if requests for the engine are passed on."""
        if self.proxy.enabled is not None:
            return self.proxy.enabled
        return self.recorder_dir is None or not self.model_fields_set.isdisjoint(_ABOUT_REQUESTS)

    @property
    def control_plane_port(self) -> int:
        """The port that serves the control plane."""
        return self.control_port or self.port

    @property
    def stale_seconds(self) -> float:
        """The age from which on a report is stale and not acted upon."""
        return max(10.0, 3 * self.poll_seconds, 2 * self.idle_poll_seconds + self.poll_seconds)


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every leaf key in dotted form (``policy.mode``) with its field, in the order of the class."""
    for name, info in Settings.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for inner, inner_info in info.annotation.model_fields.items():
                yield f"{name}.{inner}", inner_info
        else:
            yield name, info


def is_list(info: FieldInfo) -> bool:
    """Return whether the key takes a list, given as JSON on the command line and in the environment."""
    return isinstance(info.default, tuple)


def variable(key: str) -> str:
    """Return the environment variable of a dotted key."""
    return PREFIX + key.upper().replace(".", "__")
