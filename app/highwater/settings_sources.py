"""The sources of settings, and their order.

A flag beats the file named by ``--config``, that the environment, that the file named by ``HIGHWATER_CONFIG``, and that
the default. Every problem is found and reported at once, and nothing that is wrong is ever ignored.

This is not pydantic-settings: that stops at the first list that is not JSON, passes over unknown variables and files
that are missing, and reports a YAML error in the parser's words, which quote the line, and the token in it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from highwater.errors import SettingsError, sentences
from highwater.settings import PREFIX, Settings, is_list, keys, variable

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
# Ours by name and no setting of a sidecar: which one the operator's commands speak to, and where the demonstration
# keeps the engine's environment.
_NOT_SETTINGS = frozenset({CONFIG_VARIABLE, f"{PREFIX}URL", f"{PREFIX}CACHE_DIR"})
_FIELDS = dict(keys())
_QUOTED = re.compile(r"""(['"]).{2,}\1""", re.DOTALL)
# Kubernetes writes these for a Service called "highwater" into every pod of its namespace (service links).
_SERVICE_LINK = re.compile(rf"{PREFIX}(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)")


def load(
    flags: Mapping[str, str] | None = None, *, config: str | None = None, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from flags, files, environment and defaults.

    Args:
        flags: Texts by dotted key (``policy.mode``).
        config: A file named on the command line.
        environ: The environment; ``os.environ`` by default.

    Raises:
        SettingsError: With every problem found.
    """
    env = os.environ if environ is None else environ
    variables = {key: env[variable(key)] for key, _ in keys() if variable(key) in env}
    problems = list(_unknown_variables(env))
    merged: dict[str, Any] = {}
    for file, texts in ((env.get(CONFIG_VARIABLE), variables), (config, flags or {})):
        try:
            _overlay(merged, _read_file(file))
        except SettingsError as exc:
            problems += exc.problems
        for key, text in texts.items():
            _overlay(merged, _nested(key, text))
    try:
        settings = Settings(**merged)
    except ValidationError as exc:
        problems += sentences(exc.errors(include_url=False))
    else:
        if not problems:
            return settings
    raise SettingsError(problems)


def _unknown_variables(env: Mapping[str, str]) -> Iterator[str]:
    known = {variable(key) for key, _ in keys()} | _NOT_SETTINGS
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in known and not _SERVICE_LINK.fullmatch(name):
            yield f"{name}: is not a setting; see highwater serve --help"


def _read_file(name: str | None) -> dict[str, Any]:
    if not name:
        return {}
    path = Path(name)
    try:
        content = _parse(path.suffix, path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as exc:
        # Not in its own words: they quote the line, and what stands there; that may be the token.
        mark, problem = exc.problem_mark, _QUOTED.sub("...", exc.problem or "is not YAML")
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise SettingsError([f"config: {name}: {problem}{where}"]) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as exc:
        raise SettingsError([f"config: {name}: {' '.join(str(exc).split())}"]) from exc
    if not isinstance(content, dict):
        raise SettingsError([f"config: {name}: must be a table of settings, not {type(content).__name__}"])
    return content


def _parse(suffix: str, text: str) -> object:
    if suffix == ".toml":
        return tomllib.loads(text)
    if suffix in {".yaml", ".yml"}:
        return yaml.safe_load(text) or {}
    raise SettingsError([f"config: a file must end in .toml, .yaml or .yml, not {suffix or 'nothing'}"])


def _nested(key: str, text: str) -> dict[str, Any]:
    """A text by its dotted key as a tree; a list is parsed, everything else is the model's to read."""
    value: object = text
    if is_list(_FIELDS[key]):
        try:
            value = yaml.safe_load(text)  # JSON is YAML
        except yaml.YAMLError:
            value = text  # the model says what it must be
    section, _, leaf = key.rpartition(".")
    return {section: {leaf: value}} if section else {leaf: value}


def _overlay(base: dict[str, Any], top: Mapping[str, Any]) -> None:
    for key, value in top.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _overlay(base[key], value)
        else:
            base[key] = value
