"""Reads the lines of the engine's log one after another: each without what collectors put before it.

What stands before the records of a log is alike in all of them, but for its numbers. That is learned from them, and
then taken off lines without a record, too: exceptions that are printed bare, uvicorn's own lines. What stands before
few records only is no collector's, but a client's words within a line.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from highwater.diagnose.log.record import (
    API_SERVER,
    MAX_HEAD_LENGTH,
    MAX_LINE_LENGTH,
    PARTS,
    RECORD,
    JsonLine,
    LogLine,
    head_pattern,
    is_api_servers_head,
    is_clear_head,
    json_line,
    may_be_head,
    record_of,
    shape,
    uncoloured,
    writer,
)
from highwater.process.errors import os_reason
from highwater.process.regular import NotARegularFileError, open_regular

# Every open stream's traceback follows a death's cause: of a thousand, some 2 KiB each.
TAIL_BYTES = 2 * 1024 * 1024
# Of bytes that are read at once: each line costs time, and a logger's have some 100 bytes.
MOST_LINES = 64 * 1024
DOCKER_PIECE_BYTES = 16 * 1024
# Read in one go; eight ranks' tracebacks of a failed start are some 200 KiB.
LOOK_BYTES = 1024 * 1024
# The end of a line that is not written yet; a longer one is no line of a logger.
PARTIAL_BYTES = 64 * 1024
FINGERPRINT_BYTES = 64
_PIECE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)\s(?P<stream>stdout|stderr)\s(?P<tag>[FP])\s")
# A quote within the text is escaped, so that the first bare one ends it.
_JSON_PIECE = re.compile(r'\{"log":"(?:[^"\\]|\\(?!n")[^\n])*(?P<end>\\n)?","stream":"(?P<stream>stdout|stderr)"')


class LogPosition(NamedTuple):
    """A place in a log: the file as the file system identifies it, and the offset into it."""

    device: int
    inode: int
    offset: int


def position_of_end(path: Path) -> LogPosition | None:
    try:
        with open_log(path) as file:
            return end_of(file)
    except OSError:
        return None


def end_of(file: BinaryIO) -> LogPosition:
    """Return where the log is written next: its end, or a hole in it.

    `tee` without `-a` begins a log anew, and the one before it may write its last words at its own, later offset.
    """
    status, place, end = os.fstat(file.fileno()), file.tell(), 0
    with suppress(OSError):  # an empty file, or a file system that tells no holes
        hole = file.seek(0, os.SEEK_HOLE)
        file.seek(max(hole - PARTIAL_BYTES, 0))  # holes are of whole blocks
        end = hole if hole == status.st_size else file.tell() + len(file.read(hole - file.tell()).rstrip(b"\0"))
    file.seek(place)
    # A log that was cut off below its writer begins with the hole.
    return LogPosition(status.st_dev, status.st_ino, end or status.st_size)


def read_from(file: BinaryIO, offset: int, most: int, until: LogPosition | None = None) -> tuple[bytes, bool]:
    """Return what an open log holds from an offset on; of more than ``most`` bytes the end, and True.

    The end begins with a whole line. What stands behind ``until`` is left out.
    """
    end = (end_of(file) if until is None else until).offset
    start = max(offset, end - most)
    file.seek(start)
    content = file.read(max(end - start, 0))
    is_cut = start > offset
    return content.partition(b"\n")[2] if is_cut else content, is_cut


def read_tail(
    path: Path, since: LogPosition | None = None, until: LogPosition | None = None
) -> tuple[list[str], str | None, bool]:
    """Return the last lines of a log, the problem in one sentence if there is one, and whether lines are missing.

    Links are followed, since that is how container runtimes name their logs. What stands before ``since`` is left out,
    where the log is still the same file. Of a log that is another file than at ``until``, or was cut off since, every
    line came later: there are none.
    """
    try:
        with open_log(path) as file:
            end = end_of(file)
            is_same = since is not None and end[:2] == since[:2] and since.offset <= end.offset
            start = since.offset if since is not None and is_same else 0
            if until is not None and (end[:2] != until[:2] or end.offset < until.offset):
                return [], None, False
            content, is_cut = read_from(file, start, TAIL_BYTES, until)
    except OSError as exc:
        return [], _problem(path, exc), False
    lines = WholeLines(is_cut=is_cut).of(content)
    return lines, None, is_cut or len(lines) == MOST_LINES


class WholeLines:
    """Leaves out the continuations of lines that a container runtime cut into pieces: containerd and Docker at 16 KiB.

    A continuation may begin with anything that a client sent.

    Args:
        is_cut: The log's beginning is not known: the first line of each stream may be such a piece.
    """

    def __init__(self, *, is_cut: bool = False) -> None:
        self._goes_on = dict.fromkeys(("stdout", "stderr"), is_cut)

    def of(self, content: bytes) -> list[str]:
        # What was never written, before the first line after it, reads as NULs.
        texts = (line.lstrip("\0") for line in content.decode("utf-8", "replace").split("\n"))
        lines = filter(str.strip, texts)
        return [line for line in lines if not self._is_piece(line)][-MOST_LINES:]

    def _is_piece(self, line: str) -> bool:
        if (piece := _PIECE.match(line)) is not None:
            stream, is_partial = piece["stream"], piece["tag"] == "P"
        elif (piece := _JSON_PIECE.match(line)) is not None:
            # Others leave the line's end out of every line.
            stream, is_partial = piece["stream"], not piece["end"] and len(line.encode()) >= DOCKER_PIECE_BYTES
        else:
            return False
        was, self._goes_on[stream] = self._goes_on[stream], is_partial
        return was


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading; raises OSError, of it ``NotARegularFileError`` where it is no file."""
    return os.fdopen(open_regular(path, follows_link=True), "rb")


def problem_of(path: Path) -> str | None:
    """Return why a log cannot be read now."""
    try:
        open_log(path).close()
    except OSError as exc:
        return _problem(path, exc)
    return None


def _problem(path: Path, exc: OSError) -> str:
    said = "is not a file" if isinstance(exc, NotARegularFileError) else f"cannot be read: {os_reason(exc)}"
    return f"engine_log: {path} {said}"


class FollowedLog:
    """The lines that come into a log, also where it is a link, is rotated, cut off, or created later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._offset = 0
        self._before = b""  # the bytes right before the offset: a log cut off and filled again has others
        self._partial = b""
        self._whole = WholeLines()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def skip(self) -> list[str]:
        lines = self.new_lines()
        self._partial = b""
        return lines

    def new_lines(self) -> list[str]:
        """Return the lines that were added since the last call; at first the log's end. Without a log, none."""
        added = b""
        if self._file is not None:
            added = self._rest(self._file)  # a log that was rotated may have been written to before
        try:
            place = position_of_end(self._path)
            if self._file is None or place is None or place[:2] != end_of(self._file)[:2]:
                self.close()
                self._file = open_log(self._path)
                self._offset, self._before = 0, b""
                if added and not added.endswith(b"\n"):
                    added += b"\n"
                added += self._rest(self._file)
        except OSError:
            self.close()
        whole, _, partial = (self._partial + added).rpartition(b"\n")
        # The beginning of a line that is too long: further in, no logger begins a message.
        self._partial = partial[:PARTIAL_BYTES]
        return self._whole.of(whole)

    def _rest(self, file: BinaryIO) -> bytes:
        file.seek(max(self._offset - len(self._before), 0))
        if end_of(file).offset < self._offset or file.read(len(self._before)) != self._before:
            self._offset, self._partial, self._before = 0, b"", b""  # cut off
        content, is_cut = read_from(file, self._offset, LOOK_BYTES)
        if is_cut:
            self._partial, self._before = b"", b""
        self._offset = file.tell()
        self._before = (self._before + content)[-FINGERPRINT_BYTES:]
        return content


_DEPTH: Final = 4
_END: Final = 400
"""Of a line, where Ray says how often it came."""
_MAX_HEADS: Final = 16
_MAX_SHAPES, _MAX_RECORDS = 64, 4096
"""That are remembered: a log may go on in another form."""
_ONE_OF: Final = 8
"""A collector's head stands before at least one record of so many."""
_ESTABLISHED: Final = 3
"""Records, before a head that could be a sentence is one."""
_ASGI: Final = re.compile(r"Exception in ASGI application")
# The frames of a request that is served.
_SERVES: Final = re.compile(
    r'\s*File ".{0,400}(?:/starlette/|/fastapi/|/uvicorn/protocols/|/serving\w{0,40}\.py|/serving/)'
)
# What a container runtime writes needs no record to be known.
_RUNTIMES: Final = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:?\d\d)\s(?:std(?:out|err)\s[FP]\s)?")
# Lines without a record that no client's words end, or begin: they show what stands before bare lines.
_MARK: Final = re.compile(
    PARTS + r"(?:Traceback \(most recent call last\):$|usage: (?:vllm|api_server)|(?:INFO|WARNING|ERROR):\s{4,5}(?=\S))"
)
_IN_TRACEBACK: Final = re.compile(r'[\s|+]*(?:Exception Group )?Traceback \(most recent call last\):|\s+File "')
# What begins a record that goes on with an exception of the engine's, and one that names a request, perhaps in a
# client's words: vllm 0.32.0 logging_utils/dump_input.py:79, v1/structured_output/__init__.py:209.
_RAISES: Final = re.compile(
    r"EngineCore |WorkerProc |Error executing method |Invocation of \w+ method |\[E(?:rror|RROR)\]"
    r"|[\w.]{1,80}(?:Error|Exception)\b"
)
_OF_REQUEST: Final = re.compile(r"(?i)\breq(?:uest)?s?(?:_id)?\b|SchedulerOutput")
_MAX_WRITERS: Final = 64
_OBJECT: Final = re.compile(r'\{\s*"')


class _Piece:
    """A line, or a text within a JSON line: the first record or object in it, and what stands before that."""

    __slots__ = ("end", "head", "object", "pieces", "record", "text")

    def __init__(self, text: str, depth: int = _DEPTH) -> None:
        self.text, self.end = uncoloured(text), uncoloured(text[-_END:])
        self.record = RECORD.search(self.text)
        self.object: JsonLine | None = None
        self.pieces: tuple[_Piece, ...] = ()
        mark = self.record or _MARK.search(self.text)
        self.head = None if mark is None else self.text[: mark.start()]
        begins = _OBJECT.search(text, 0, 2 * MAX_HEAD_LENGTH) if depth else None
        before = "" if begins is None else uncoloured(text[: begins.start()])
        if begins is None or (self.head is not None and len(self.head) < len(before)):
            return
        self.object = json_line(text[begins.start() :])
        if self.object is not None:
            self.head = before
            texts = () if self.object.is_loggers else (*self.object.texts, *self.object.exception)
            self.pieces = tuple(_Piece(inner, depth - 1) for inner in texts)


class Reader:
    """Reads a log; what it, or another reader of the log, has learned holds for the next lines."""

    def __init__(self, before: Reader | None = None) -> None:
        self._shapes: Counter[str] = Counter() if before is None else before._shapes.copy()
        self._heads: dict[str, re.Pattern[str]] = {} if before is None else before._heads.copy()
        # Of each process the last record: its first line, or its traceback's.
        self._open: dict[str | None, LogLine] = {}
        self._serves = False  # bare lines are the API server's: a request's traceback

    def read(self, texts: Iterable[str]) -> list[tuple[str, tuple[LogLine, ...]]]:
        """Return each line as it stands in the log, and the lines in it: JSON may hold several, and none."""
        found = [(text, _Piece(text)) for text in texts]
        for _, piece in found:
            self._learn(piece)
        for _, piece in found:
            self._keep(piece)
        return [(text, tuple(self._lines_of(piece))) for text, piece in found]

    # --- what stands before ---

    def _learn(self, piece: _Piece) -> None:
        for inner in piece.pieces:
            self._learn(inner)
        if piece.head is None or not may_be_head(piece.head):
            return
        self._shapes[shape(piece.head)] += 1
        if len(self._shapes) > _MAX_SHAPES or self._shapes.total() > _MAX_RECORDS:
            self._shapes = Counter({each: count // 2 for each, count in self._shapes.most_common(_MAX_SHAPES // 2)})

    def _is_head(self, head: str) -> bool:
        if not head.strip():
            return True
        count = self._shapes[shape(head)] if may_be_head(head) else 0
        is_clear = is_clear_head(head) and not is_api_servers_head(head)
        return count * _ONE_OF >= self._shapes.total() and count >= (1 if is_clear else _ESTABLISHED)

    def _keep(self, piece: _Piece) -> None:
        for inner in piece.pieces:
            self._keep(inner)
        if piece.head is None or not piece.head.strip() or not self._is_head(piece.head):
            return
        pattern = head_pattern(piece.head)
        if not pattern.pattern:
            return
        self._heads.pop(pattern.pattern, None)
        self._heads[pattern.pattern] = pattern
        if len(self._heads) > _MAX_HEADS:
            self._heads.pop(next(iter(self._heads)))

    # --- lines ---

    def _lines_of(self, piece: _Piece) -> Iterator[LogLine]:
        is_found = piece.head is not None and self._is_head(piece.head)
        if is_found and piece.object is not None and not is_api_servers_head(piece.head or ""):
            process, pid = writer(piece.head or "")
            for line in self._of_object(piece, piece.object):
                is_nobodys = line.process is None and line.file is None
                yield replace(line, process=process, pid=pid) if process and is_nobodys else line
        elif is_found and piece.object is None and piece.record is not None:
            self._serves = False
            yield self._placed(record_of(piece.text, piece.record, piece.end))
        else:
            patterns = (_RUNTIMES, *self._heads.values())
            ends = (found.end() for pattern in patterns if (found := pattern.match(piece.text)))
            free = piece.text[max(ends, default=0) :]
            line = record_of(free, RECORD.match(free), piece.end)
            # Without a record it is the API server's where that goes on with a request's traceback.
            if line.is_form:
                self._serves = line.is_api_servers and bool(_ASGI.match(line.message))
            else:
                self._serves = self._serves or bool(_SERVES.match(line.text))
                line = replace(line, process=API_SERVER) if self._serves else line
            yield line

    def _of_object(self, piece: _Piece, found: JsonLine) -> Iterator[LogLine]:
        if found.is_loggers:
            self._open.clear()
            yield from (self._placed(_logged(found, message)) for message in found.texts)
            yield from (_logged(found, message) for message in found.exception)
        self._serves = self._serves and not found.exception
        for inner in piece.pieces:
            yield from self._lines_of(inner)

    def _placed(self, line: LogLine) -> LogLine:
        first = self._open.get(line.process)
        if not line.head or first is None or first.head != line.head:
            self._open = self._open if len(self._open) < _MAX_WRITERS else {}
            self._open[line.process] = line
            return line
        opening = first.message if first.opening is None else first.opening
        is_engines = _RAISES.match(opening) is not None or line.message == opening
        is_within = is_engines or (_IN_TRACEBACK.match(first.message) and _OF_REQUEST.search(opening) is None)
        line = replace(line, opening=opening, is_clients=not is_within)
        if _IN_TRACEBACK.match(line.message):
            self._open[line.process] = line
        return line


def _logged(found: JsonLine, message: str) -> LogLine:
    process = found.process
    if process is not None and found.pid is not None:
        process = f"{process} pid={found.pid}"
    marks = (f"({process})" if process else None, found.level, f"[{found.file}]" if found.file else None)
    return LogLine(
        text=" ".join((*filter(None, marks), message[:MAX_LINE_LENGTH])),
        head=" ".join(filter(None, marks)),
        message=uncoloured(message),
        process=process,
        pid=found.pid,
        level=found.level,
        file=found.file,
        is_form=True,
    )
