"""The sources of settings, and their order.

A flag beats the file named by ``--config``, that the environment, that the file named by ``HIGHWATER_CONFIG``, and that
the default. All problems are reported at once, and no invalid value is ignored.

This is not pydantic-settings: that stops at the first list that is not JSON, ignores unknown variables and missing
files, and reports a YAML error with the parser's message, which quotes the line, and the token in it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from highwater.act.rules import Rule
from highwater.process.errors import SettingsError
from highwater.process.settings_file import parse_yaml, read_settings_file
from highwater.process.untrusted import masked, sentences
from highwater.server.settings.settings import PREFIX, Settings, is_list, keys, variable

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
    for file, texts in ((env.get(CONFIG_VARIABLE), variables), (config, flags or {})):
        try:
            _overlay(merged, read_settings_file(file) if file else {})
        except SettingsError as exc:
            problems += exc.problems
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
        problems += sentences(exc.errors(include_url=False), _nearest_key, fields=_FIELDS)
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


def _overlay(base: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(base[key], value)
        else:
            base[key] = value
