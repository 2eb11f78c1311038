"""The sidecar's own log: lines for people, or one JSON object a line, uvicorn's and Python's warnings included."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal, TypeAlias, get_args

LogFormat: TypeAlias = Literal["text", "json"]

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# uvicorn's general log has this name.
_NAMES: Final = {"uvicorn.error": "uvicorn"}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON: ``time`` (UTC), ``level``, ``logger``, ``message``, and ``exception``."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line)


def _with_plain_name(record: logging.LogRecord) -> bool:
    record.name = _NAMES.get(record.name, record.name)
    return True


def configure_log(level: str, form: LogFormat) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(_with_plain_name)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(capture=True)
    # One line for each control call tells nothing new; what uvicorn says of its start, our own lines say.
    for name in ("httpx", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]))


Part: TypeAlias = Literal[
    "poller", "policy", "shared_devices", "host", "incidents", "diagnosis", "growth", "proxy", "http"
]


class InternalErrors:
    def __init__(self) -> None:
        self.counts: Counter[Part] = Counter(dict.fromkeys(get_args(Part), 0))

    def counter(self, part: Part) -> Callable[[], None]:
        return partial(self.counts.update, (part,))


@contextmanager
def contained(
    internal_error: Callable[[], None], log: logging.Logger, message: str, *arguments: object
) -> Iterator[None]:
    """Log and count what is raised inside, and go on after it: a failing part costs one round of itself."""
    try:
        yield
    except Exception:
        # Broad: it is for what nobody foresaw.
        internal_error()
        log.exception(message, *arguments)
