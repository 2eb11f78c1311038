"""The engine's log as a file: its end, what was added since, and places in it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

from highwater.errors import os_reason
from highwater.files.regular import NotARegularFileError, open_regular

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
        return end_of(path)
    except OSError:
        return None


def end_of(log: Path | BinaryIO) -> LogPosition:
    status = log.stat() if isinstance(log, Path) else os.fstat(log.fileno())
    return LogPosition(status.st_dev, status.st_ino, status.st_size)


def read_from(file: BinaryIO, offset: int, most: int, until: LogPosition | None = None) -> tuple[bytes, bool]:
    """Return what an open log holds from an offset on; of more than ``most`` bytes the end, and True.

    The end begins with a whole line. What stands behind ``until`` is left out.
    """
    end = (end_of(file) if until is None else until).offset
    start = max(offset, end - most)
    file.seek(start)
    content = file.read(most if until is None else max(end - start, 0))
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
    except NotARegularFileError:
        return [], f"engine_log: {path} is not a file", False
    except OSError as exc:
        return [], f"engine_log: {path} cannot be read: {os_reason(exc)}", False
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
        lines = filter(str.strip, content.decode("utf-8", "replace").split("\n"))
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
