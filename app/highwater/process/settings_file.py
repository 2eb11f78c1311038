"""A settings file, TOML or YAML, read with bounds.

A pipe or a device is refused before it is opened: it could block the start without end. A YAML key that is given twice
is refused too, where the parser itself would silently let the last one win.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final, cast

import yaml

from highwater.model.units import MIB
from highwater.process.errors import SettingsError, os_reason
from highwater.process.regular import FileTooLargeError, NotARegularFileError, read_regular
from highwater.process.untrusted import masked, plain

MAX_BYTES: Final = MIB
# The parser's messages quote its own tokens, such as '<block end>' and ',', and what stands in the file.
_QUOTED = re.compile(r"""'(?:<[a-z ]+>|.)'|(['"]).{2,}\1""", re.DOTALL)
_SHOWN_KEY = 64
_MERGE: Final = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """The safe loader, which takes each key of a mapping once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                continue
            key: Any = cast("Any", self).construct_object(key_node, deep=True)  # without types in some stubs
            if not isinstance(key, Hashable):  # reported below
                continue
            line = key_node.start_mark.line + 1
            if key in lines:
                name = plain(masked(str(key)), _SHOWN_KEY)
                raise SettingsError(
                    [f"{name}: is given twice, on line {lines[key]} and on line {line}; keep one of the two"]
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


def read_settings_file(path: str) -> dict[str, Any]:
    """Return the settings in a file whose name ends in ``.toml``, ``.yaml`` or ``.yml``.

    Raises SettingsError where it cannot be read, is not a regular file, has over 1 MiB, or is not a table; its one line
    never quotes the content, which may be the token.
    """
    name, suffix = masked(path), Path(path).suffix
    if suffix not in {".toml", ".yaml", ".yml"}:
        raise _problem(f"{name}: a file must end in .toml, .yaml or .yml, not {Path(name).suffix or 'nothing'}")
    try:
        text = read_regular(path, MAX_BYTES, follows_link=True).decode("utf-8")  # a ConfigMap's files are links
        content = tomllib.loads(text) if suffix == ".toml" else parse_yaml(text) or {}
    except SettingsError as exc:
        raise SettingsError([f"config: {name}: {problem}" for problem in exc.problems]) from None
    except NotARegularFileError:
        kind = "a folder" if Path(path).is_dir() else "a pipe or a device"
        raise _problem(f"{name}: must be a regular file, and is {kind}") from None
    except FileTooLargeError:
        raise _problem(f"{name}: has over {MAX_BYTES:,} bytes, the most that a settings file may have") from None
    except OSError as exc:
        raise _problem(f"{name}: {os_reason(exc)}") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise _problem(f"{name}: {' '.join(str(exc).split())}") from exc
    except RecursionError:
        raise _problem(f"{name}: is nested too deeply") from None
    return _table(name, content)


def _table(name: str, content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise _problem(f"{name}: must be a table of settings, not {type(content).__name__}")
    for key in content:
        if not isinstance(key, str):  # YAML takes 1, null and a date for what they are
            shown = "null" if key is None else plain(masked(str(key)), _SHOWN_KEY)
            raise _problem(f"{name}: {shown}: there is no such key; a key is the name of a setting")
    return content


def parse_yaml(text: str) -> object:
    """Parse YAML, and so JSON. Raises SettingsError where it is not YAML, or a key is given twice."""
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        # The parser's own message quotes the line, which may hold the token.
        mark, said = exc.problem_mark, exc.problem or "is not YAML"
        problem = _QUOTED.sub(lambda quoted: quoted[0] if quoted[1] is None else "...", said)
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise SettingsError([f"{problem}{where}"]) from None
    except yaml.YAMLError as exc:
        raise SettingsError([" ".join(str(exc).split())]) from exc
    except ValueError as exc:  # a date that does not exist, a number of too many digits
        raise SettingsError([f"a value cannot be read: {' '.join(str(exc).split())}"]) from exc


def _problem(text: str) -> SettingsError:
    return SettingsError([f"config: {text}"])
