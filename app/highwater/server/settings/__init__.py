"""The settings: type, default, unit and meaning of each, in one frozen object, and the sources that fill it.

A flag beats the file named by ``--config``, that the environment, that the file named by ``HIGHWATER_CONFIG``, and that
the default. All problems are reported at once, and no invalid value is ignored.

This is not pydantic-settings: that stops at the first list that is not JSON, ignores unknown variables and missing
files, and reports a YAML error with the parser's message, which quotes the line, and the token in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from gated_proxy.allowlist import root_path_flaw
from gated_proxy.engine import port_of
from gated_proxy.logs import STANDARD_OUTPUT
from highwater.act.rules import Finite, PolicySettings, Rule
from highwater.process.admin_token import MIN_LENGTH, is_loopback, is_strong_enough
from highwater.process.errors import SettingsError
from highwater.process.resources import room_at_most
from highwater.process.settings_file import parse_yaml, read_settings_file
from highwater.process.untrusted import MayHoldSecret, masked, sentences, without_credentials
from highwater.server.settings.sections import (
    DoorSettings,
    EngineTlsSettings,
    File,
    FileInFolder,
    Folder,
    GateSettings,
    IncidentSettings,
    ProxySettings,
    TlsSettings,
    TrimSettings,
    check_path,
    is_file_in_folder,
    too_many,
)

PREFIX = "HIGHWATER_"
LogFormat: TypeAlias = Literal["text", "json"]

# Records of 2 KiB in one recorder's file, beside less than 1 MiB of other areas; its reader takes no more than 64 MiB
# (docs/recorder.md).
MAX_RECORDS = 32_000

_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound to
# Settings about requests for the engine: with one of them set, requests are passed on.
_ABOUT_REQUESTS = frozenset({"engine_url", "engine_root_path", "engine_tls", "control_port", "gate", "door", "proxy"})


class Settings(BaseModel, frozen=True, extra="forbid"):
    engine_url: Annotated[str, MayHoldSecret(without_credentials)] = Field(
        "http://127.0.0.1:8000", description="the vLLM server: http, https or unix:/path"
    )
    engine_root_path: str | None = Field(
        None,
        description="the root path of vLLM, `/` if none: below it the same paths are proxied as without it",
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8001, ge=1, le=65535, validate_default=True, description="port to listen on")
    control_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port for the control plane, metrics and probes; port then serves the engine's paths alone; unset: "
        "port serves both",
    )
    admin_token: Annotated[SecretStr | None, MayHoldSecret()] = Field(
        None, description="control calls must carry it; unset: the token in admin_token_file"
    )
    admin_token_file: File | None = Field(
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
    recorder_dir: Folder | None = Field(
        None,
        description="folder shared with the workers, under the same path, for recorders and snapshots; unset: disabled",
    )
    recorder_rate: Finite = Field(10.0, ge=1, le=100, description="samples a second that each worker records")
    recorder_seconds: Finite = Field(120.0, ge=10, le=3600, description="how long each worker's recorder reaches back")
    max_step_seconds: Finite = Field(
        120.0,
        gt=0,
        le=86_400,
        description="a worker in one step for longer is stuck, before that busy; without recorder_dir, an engine that "
        "answers no call for so long is not ready",
    )
    engine_log: File | None = Field(
        None, description="the engine's log, whose known messages an incident explains; unset: disabled"
    )
    shutdown_seconds: Finite = Field(
        30.0, ge=0, le=3600, description="how long streams may go on after the signal to stop"
    )
    state_file: FileInFolder | None = Field(
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
    door: DoorSettings = DoorSettings()
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
        shape = "must be http://HOST:PORT, https://HOST:PORT or unix:/PATH"
        try:
            parts = urlsplit(value)
            port = parts.port
        except ValueError:  # its text quotes the URL, which may hold a password
            raise ValueError(shape) from None
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0:
            raise ValueError(shape)
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
        path = check_path(Path(value), is_file_in_folder, "- or the absolute path of a file in a folder that exists")
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
        if engine_url is None or host is None or engine_url.startswith("unix:"):
            return value
        parts = urlsplit(engine_url)
        name = parts.hostname or ""
        if host in _EVERYWHERE:
            is_here = is_loopback(name) or name in _EVERYWHERE
        else:
            is_here = "localhost" in (name, host) and is_loopback(name) and is_loopback(host)
        if port_of(parts) == value and (is_here or name == host.strip("[]").lower()):
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
            raise ValueError(f"max_connections ({value.max_connections}) {too_many(room)}, with a control_port")
        return value

    @property
    def has_data_plane(self) -> bool:
        if self.proxy.enabled is not None:
            return self.proxy.enabled
        return self.recorder_dir is None or not self.model_fields_set.isdisjoint(_ABOUT_REQUESTS)

    @property
    def control_plane_port(self) -> int:
        return self.control_port or self.port

    @property
    def stale_seconds(self) -> float:
        """The age from which on a report is stale and not acted upon."""
        return max(10.0, 3 * self.poll_seconds, 2 * self.idle_poll_seconds + self.poll_seconds)


# --- their dotted names, and the environment variables of these names ---


def keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every leaf key in dotted form (``policy.mode``) with its field, in the order of the class."""
    for name, info in Settings.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for inner, inner_info in info.annotation.model_fields.items():
                yield f"{name}.{inner}", inner_info
        else:
            yield name, info


def is_list(info: FieldInfo) -> bool:
    return isinstance(info.default, tuple)


def variable(key: str) -> str:
    return PREFIX + key.upper().replace(".", "__")


# --- their sources ---

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
# Variables with our prefix that are not settings: the sidecar that the operator's commands call, and the folder where
# the demonstration keeps the engine's environment.
_NOT_SETTINGS = frozenset({CONFIG_VARIABLE, f"{PREFIX}URL", f"{PREFIX}CACHE_DIR"})
_FIELDS = dict(keys())
_SECTIONS = tuple(key for key, info in Settings.model_fields.items() if isinstance(info.default, BaseModel))
# difflib's ratio: one wrong letter, one too many or two swapped are over it; another setting of a family is not.
_ALIKE = 0.85
# Kubernetes writes these for a Service called "highwater" into every pod of its namespace (service links).
_SERVICE_LINK = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)")


def load(
    flags: Mapping[str, str] | None = None, *, config: str | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Load settings from flags (texts by dotted key), a file, the environment and defaults.

    Raises SettingsError with every problem found.
    """
    env = os.environ if environ is None else environ
    variables = {key: env[variable(key)] for key, _ in keys() if variable(key) in env}
    problems = []
    known = {variable(key) for key, _ in keys()} | _NOT_SETTINGS
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name):
            near = _nearest(name, known, lambda text: re.sub("_+", "_", text))
            meant = f"did you mean {near}?" if near else "see highwater serve --help"
            problems.append(f"{masked(name)}: is not a setting; {meant}")
    merged: dict[str, Any] = {}
    files: dict[tuple[int | str, ...], str | None] = {}  # by a key's parts; None: it stands in no file
    for file, texts in ((env.get(CONFIG_VARIABLE), variables), (config, flags or {})):
        try:
            _overlay(merged, content := read_settings_file(file) if file else {})
            files |= dict.fromkeys(_places(content), file)
        except SettingsError as exc:
            problems += exc.problems
        files |= {tuple(key.split(".")): None for key in texts}
        for key, text in texts.items():
            value: object = text
            if is_list(_FIELDS[key]):  # everything else is left to the model
                with suppress(SettingsError):  # the model reports what it must be
                    value = parse_yaml(text)  # JSON is YAML
            section, _, leaf = key.rpartition(".")
            _overlay(merged, {section: {leaf: value}} if section else {leaf: value})
    try:
        settings = Settings(**merged)
    except ValidationError as exc:
        problems += _told(exc, files)
    else:
        if not problems:
            return settings
    raise SettingsError(problems)


def _nearest(given: str, known: Iterable[str], plain: Callable[[str], str] = str) -> str | None:
    """Return the known name that was probably meant: the same but for what `plain` leaves out, or the most alike."""
    names = {plain(name): name for name in sorted(known)}
    matches = get_close_matches(plain(given), names, n=1, cutoff=_ALIKE)
    return names[matches[0]] if matches else None


def _nearest_key(key: str) -> str | None:
    """Return the key of a file that was probably meant, in dotted form; `policy.rules.0.` stands before a rule's."""
    rule = re.match(r"policy\.rules\.\d+\.", key)
    known = [f"{rule[0]}{name}" for name in Rule.model_fields] if rule else [*_FIELDS, *_SECTIONS]
    # A key of a section is often written without it.
    return _nearest(key, known) or next((name for name in _FIELDS if name.endswith(f".{key}")), None)


def _told(exc: ValidationError, files: Mapping[tuple[int | str, ...], str | None]) -> Iterator[str]:
    errors = exc.errors(include_url=False)
    for error, said in zip(errors, sentences(errors, _nearest_key, fields=_FIELDS), strict=True):
        places = (error["loc"][:2], error["loc"][:1])
        file = next((files[place] for place in places if place in files), None)
        yield said if file is None else f"{said} (in {masked(file)})"


def _places(content: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in content.items():
        yield (key,)
        if isinstance(value, dict):
            yield from ((key, inner) for inner in value)


def _overlay(base: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(base[key], value)
        else:
            base[key] = value
