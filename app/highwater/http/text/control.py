"""What acts, as text: remedies with what each gave back, marks, PyTorch's snapshots, events, and the policy."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any

from highwater.act.governor import PolicyStore
from highwater.act.relief import RemedyOutcome
from highwater.act.rules import Rule
from highwater.model.components import COMPONENT_NAMES, component_title
from highwater.model.policy import WORDS, PolicyStatus, signal_text, waters_text
from highwater.model.rank import rank_title
from highwater.model.remedies import compare, reasons_of
from highwater.model.report import Event
from highwater.model.units import UNKNOWN, gib_text, size_text, span_text, table
from highwater.process.clocks import local_time_text
from highwater.process.untrusted import plain
from highwater.watch.history import Mark
from highwater.watch.snapshots import RankStacks, Taken


def reclaim_text(results: Sequence[RemedyOutcome], *, dry_run: bool) -> str:
    if not results:
        return "nothing was done\n"
    found = [each.result for each in results]
    if dry_run:
        would_be = {"observed": "done"}
        rows = [[one.remedy, would_be.get(one.outcome, one.outcome), gib_text(one.can_give_bytes)] for one in found]
        parts = [table(["remedy", "would be", "could give back"], rows)]
    else:
        rows = []
        for one in found:
            held = UNKNOWN if one.held_seconds is None else f"{one.held_seconds:.2f} s"
            sizes = gib_text(one.credited_bytes), gib_text(one.freed_bytes)
            rows.append([one.remedy, one.outcome, one.quiesced_by or UNKNOWN, *sizes, f"{one.seconds:.2f}", held])
        headers = ["remedy", "outcome", "quiesced by", "given back", "less in use now", "seconds", "held"]
        parts = [table(headers, rows)]
        # Nothing given back looks like a failure, where it was done and frees something else.
        idle = [one for one in found if one.outcome == "done" and not one.credited_bytes]
        parts += reasons_of((one.remedy, f"frees {one.frees}, not {one.does_not_free}") for one in idle if one.frees)
    parts += reasons_of((one.remedy, one.reason) for one in found if one.reason)
    before, after = results[0].before, results[-1].after
    if any(one.outcome == "done" for one in found) and (freed := compare(after, before)):
        in_use = {rank.key: rank.used_bytes for rank in after}
        rows = [
            [component_title(name), *(gib_text(getattr(each.components, name)) for each in freed)]
            for name in COMPONENT_NAMES
            if any(getattr(each.components, name) for each in freed)
        ]
        rows.append(["all", *(gib_text(each.used_bytes) for each in freed)])
        rows.append(["used now", *(gib_text(in_use[each.key]) for each in freed)])
        parts.append("\n" + table(["less in use now", *(each.name for each in freed)], rows))
    return "\n".join(part for part in parts if part) + "\n"


def restored_text(ranks: Sequence[Mapping[str, Any]]) -> str:
    if not any(one["restored_entries"] or one.get("left_entries") for one in ranks):
        return "nothing was on the host\n"
    rows = [
        [rank_title(one.get("dp_rank"), one["rank"]), str(one["restored_entries"]), size_text(one["restored_bytes"])]
        for one in ranks
    ]
    return table(["rank", "entries brought back", "bytes"], rows) + "\n"


def marked_text(mark: Mark) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(mark.at))
    hint = f"what changed since: highwater status --since {shlex.quote(mark.name)}"
    text = hint if mark.ranks else "no rank could be read, so there is nothing to compare with later"
    return f"marked {mark.name!r} at {at}; {text}\n"


def taken_text(taken: Taken) -> str:
    rows = [
        [rank.label, size_text(rank.bytes), f"{rank.elapsed_ms / 1000:.2f} s", rank.path or UNKNOWN]
        for rank in taken.ranks
    ]
    head = "would write, now:" if taken.snapshot is None else f"snapshot {taken.snapshot} is written:"
    return f"{head}\n{table(['rank', 'size', 'stood still', 'path'], rows, words=1)}\n"


def stacks_text(ranks: Sequence[RankStacks]) -> str:
    lines = []
    for rank in ranks:
        recorded = "not recorded any more" if rank.was_recording else "not recorded now"
        if rank.recording:
            recorded = f"recorded for {span_text(rank.seconds_left)}"
        lines.append(f"{rank.name}: allocation stacks are {recorded}\n")
    return "".join(lines)


def snapshots_text(files: Sequence[tuple[str, int]], folder: object | None, problem: str | None) -> str:
    rows = [[size_text(size), path] for path, size in files]
    if rows:
        shown = table(["size", "highwater get PATH > FILE"], rows, words=1)
    else:
        shown = f"there are no snapshots in {folder}" if folder is not None else "recorder_dir is not set"
    return "\n".join(filter(None, (shown, problem))) + "\n"


# --- the policy ---

_KIND_WIDTH = 9


def event_text(event: Event) -> str:
    at = local_time_text(event.at)
    by = f" (by the policy, rule {event.rule})" if event.trigger == "policy" and event.rule else ""
    if event.caller is not None:
        by = f" (by {event.caller.by} from {event.caller.address or 'an unknown peer'})"
    return plain(f"{at} {event.kind:<{_KIND_WIDTH}} {event.summary}{by}")


def policy_text(status: PolicyStatus, rules: Sequence[Rule], store: PolicyStore, decisions: Sequence[Event]) -> str:
    """Return the policy in force; ``decisions`` are the last ones, newest first."""
    kept = "ends with the sidecar" if store.kept_in is None else f"is kept in {store.kept_in}"
    origin = f"changed while it runs; the change {kept}" if store.source == "put" else "as it was configured"
    configured = {rule.name: rule for rule in rules}
    lines = [
        f"mode: {status.mode}, {origin}",
        f"{WORDS[status.shown_level]}: {status.summary}",
        f"actions in the last hour: {status.actions_last_hour}",
    ]
    for rule in status.rules:
        own = configured.get(rule.name)
        remedies = ", ".join(own.ordered_remedies if own is not None else ()) or "none"
        times = [f"for {span_text(own.sustain_seconds)}"] if own is not None and own.sustain_seconds else []
        times.append(f"cooldown {span_text(None if own is None else own.cooldown_seconds)}")
        waters = waters_text(rule) or "waters not known yet"
        state = f"{WORDS[rule.phase]}, {rule.signal} {signal_text(rule.signal, rule.value)}, {waters}"
        why = f"; {rule.reason}" if rule.reason else ""
        lines.append(f"rule {rule.name}: {state}, {', '.join(times)}; runs {remedies}{why}")
    lines += ["last decisions:"] if decisions else []
    return "\n".join([*lines, *map(event_text, reversed(decisions))]) + "\n"
