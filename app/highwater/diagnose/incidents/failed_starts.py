"""Failed starts that are worth an incident, each once: by the files of workers and processes, and by the engine's log.

::

    files show a failure ──┬── no log, or it began again since ──► an incident at once
                           └── with a log ──► unsaid ──┬── the log says why ──────────────────► an incident, with that
                                                       └── LOG_SECONDS, or the next one runs ──► an incident without
    the log alone shows one ─────────────────────────────────────────────────────────────────► an incident, unless it
                                                                                                is silent and known
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TypeAlias

from highwater.diagnose.evidence import Evidence
from highwater.diagnose.incidents.incidents import Incidents
from highwater.diagnose.log.starts import LAST_WORDS_SECONDS, SILENCE_SECONDS, FailedStart
from highwater.diagnose.log.story import LogStory
from highwater.engine.life import LOOP_SECONDS
from highwater.model.report import Report
from highwater.watch.history import History
from highwater.watch.starts import PREFIX, Starts

MAX_UNSAID = 16
# How long to wait for the log to explain a start that the files show as failed.
LOG_SECONDS = LAST_WORDS_SECONDS + SILENCE_SECONDS
_UNTOLD = LogStory(problem="which lines of the engine's log are of this start is not known")

Unwritten: TypeAlias = tuple[Evidence, str | None]
"""The evidence of an incident to be opened, and the recorders to read for it."""


class FailedStarts:
    """Waits for the log to explain a start that the files show as failed.

    ``evidence`` returns what is known of a start, given the report, the reason and the model.
    """

    def __init__(
        self,
        incidents: Incidents,
        history: History,
        starts: Starts,
        evidence: Callable[[Report, str, str | None], Evidence],
    ) -> None:
        self._incidents = incidents
        self._history = history
        self._starts = starts
        self._evidence = evidence
        self._unsaid: deque[Unwritten] = deque(maxlen=MAX_UNSAID)
        # What the log had before the first look, this sidecar has not seen.
        self._has_looked = False
        # When the log began again, where that was not known to end a start yet.
        self._begun_at = 0.0
        self._ended_at = float("-inf")

    def is_look_due(self, report: Report) -> bool:
        return report.engine.traits.is_absent or bool(self._unsaid)

    def notice(self, report: Report, before: Report | None) -> Unwritten | None:
        """Return the incident of a start that failed by its files, unless the log may say why first.

        Workers that ended in order before their start was over were perhaps stopped by somebody: that is an event,
        unless it happens again soon.
        """
        failure = report.start_failure
        if failure is None or (before is not None and failure == before.start_failure):
            return None
        has_failed = failure.is_silent or any(one.error is not None or one.status == "dead" for one in failure.ranks)
        is_again, self._ended_at = failure.at - self._ended_at < LOOP_SECONDS, failure.at
        if not (has_failed or is_again):
            return None
        model = None if before is None else before.engine.model
        evidence = self._evidence(report, failure.summary.removeprefix(PREFIX), model)
        evidence = replace(evidence, start=FailedStart(id=failure.recorder_instance, story=_UNTOLD))
        unwritten = evidence, None if failure.is_silent else failure.recorder_instance
        if self._incidents.has_log and self._begun_at <= failure.at:
            self._unsaid.append(unwritten)
            return None
        return unwritten

    async def look(self, report: Report, *, at_once: bool = False) -> AsyncIterator[Unwritten]:
        """Look at the log, and yield the incidents of starts that have failed; ``at_once`` without waiting for it."""
        is_absent = report.engine.traits.is_absent
        if self._unsaid and self._starts.is_under_way:  # nothing more is written of the one before
            at_once = at_once or self._waited_seconds >= LAST_WORDS_SECONDS
        for start in await self._incidents.failed_starts(at_once=at_once) if is_absent else ():
            is_silent = not start.story.messages and start.story.exception is None
            is_new = self._has_looked and self._starts.note_failed_by_log(is_silent)
            if self._unsaid:
                evidence, instance = self._unsaid.popleft()
            elif is_silent and not is_new:
                self._begun_at = self._history.now()
                continue
            else:
                reason = "it ended during its start, without an error message" if is_silent else ""
                evidence, instance = self._evidence(report, reason, None), None
                self._history.record("state", f"{PREFIX}{reason or 'its log says why'}")
            known = start if evidence.start is None or not is_silent else replace(start, id=evidence.start.id)
            yield replace(evidence, start=known), instance
        self._has_looked = True
        at_once = at_once or not is_absent  # what follows in the log is of an engine that runs
        while self._unsaid and (at_once or self._waited_seconds >= LOG_SECONDS):
            yield self._unsaid.popleft()

    @property
    def _waited_seconds(self) -> float:
        return self._history.now() - self._unsaid[0][0].at
