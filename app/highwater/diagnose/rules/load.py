"""A measured load: whether its figures can be trusted, what grew, how near the limit it came, what came back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from highwater.diagnose.case import Case, given
from highwater.diagnose.evidence import (
    AFTER,
    BEFORE,
    PEAK,
    has_restarted,
    highest,
    host_used,
    risen,
    same_process,
    total,
)
from highwater.diagnose.finding import COMPONENT_MEANING, Finding, Weight, finding
from highwater.diagnose.rules.growth import MAIN_SHARE, MINOR_SHARE, for_growth, meaning
from highwater.model.components import COMPONENT_NAMES, component_title
from highwater.model.rank import RankReading
from highwater.model.remedies import RemedyResult
from highwater.model.report import Event
from highwater.model.units import MIB, size_text

TIGHT_RATIO = 0.05
HOST_BYTES = 512 * MIB
CAME_BACK_SHARE = 0.9
TRANSIENT_BYTES = 256 * MIB
FEW_IMAGES = 4
# Of each rank: a remedy that freed less has freed nothing.
NOTHING_BYTES = 16 * MIB
SHORT_SECONDS = 3.0

# --- whether the figures can be trusted ---


def load_failed(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    if experiment.load.exit_code == 0 and not experiment.load.interrupted:
        return None
    return finding(
        "load_failed",
        weight="clue" if experiment.load.interrupted else "likely",
        interrupted=experiment.load.interrupted,
        seconds=experiment.load.seconds,
        how=f"with {experiment.load.exit_text}",
        incident=experiment.happened("incident"),
    )


def engine_incident(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    incidents = experiment.happened("incident")
    if not incidents:
        return None
    counted = _count(len(incidents), "an incident", "incidents")
    return finding("engine_incident", incidents=counted, first=incidents[0].summary)


def engine_restarted(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    before = experiment.moment(BEFORE)
    return finding("engine_restarted") if before and has_restarted(before, experiment.moments[-1]) else None


def stale_readings(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    if not experiment.gaps:
        return None
    return finding(
        "stale_readings",
        seconds=experiment.gaps[0].seconds,
        gaps=_count(len(experiment.gaps), "One such gap", "such gaps"),
        after=max(experiment.gaps[0].start - experiment.load.started_at, 0),
    )


def no_traffic(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    seen = (counted.requests_running for at, counted in experiment.traffic if experiment.load.lasted(at))
    running = [count for count in seen if count is not None]
    grown = experiment.change(BEFORE, PEAK, "used_bytes")
    is_short = experiment.load.seconds < SHORT_SECONDS or len(running) < FEW_IMAGES
    if is_short or any(running) or grown is None or grown > case.notable_bytes:
        return None
    return finding("no_traffic", readings=len(running), url=experiment.engine.url)


def other_traffic(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    sides = {
        "before the load": [load for at, load in experiment.traffic if at <= experiment.load.started_at][-1:],
        "after it": [load for at, load in experiment.traffic if at > experiment.load.ended_at][:1],
    }
    busy = [when for when, loads in sides.items() for load in loads if load.requests_running or load.requests_waiting]
    return finding("other_traffic", when=" and ".join(busy)) if busy else None


# --- what grew ---


def no_growth(case: Case) -> Finding | None:
    grown = case.grown_bytes
    return None if grown is None or case.has_grown else finding("no_growth", grown=grown)


def non_torch_growth(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    grown, whole = experiment.change(BEFORE, AFTER, "non_torch_bytes"), case.grown_bytes
    if grown is None or whole is None or grown <= case.notable_bytes:
        return None
    if not MINOR_SHARE * whole <= grown < MAIN_SHARE * whole:
        return None
    advice = for_growth("non_torch_bytes", case)
    return finding(
        "non_torch_growth", advice=advice, grown=grown, meaning=meaning("non_torch_bytes", experiment.device.type)
    )


def kv_pool(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    pool = total(rank.components.kv_cache_bytes for rank in experiment.ranks(AFTER))
    moved = experiment.change(BEFORE, AFTER, "kv_cache_bytes")
    if pool is None or moved is None:
        return None
    weight: Weight = "clue" if moved else "note"
    ranks, meaning = len(experiment.ranks(AFTER)), COMPONENT_MEANING["kv_cache_bytes"]
    together = f" on {ranks} ranks together" if ranks > 1 else ""
    return finding("kv_pool", weight=weight, moved=moved, pool=pool, together=together, meaning=meaning)


def host_growth(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    if experiment.device.traits.is_host_memory:
        return None
    pairs = [(same_process(experiment.ranks(BEFORE), now), now) for now in experiment.ranks(AFTER)]
    workers = total(risen(first, now, lambda each: each.host_memory.rss_bytes) for first, now in pairs)
    # Ranks of one machine have the same figure, so the largest is taken.
    machine, _ = highest(pairs, lambda pair: risen(*pair, host_used)) or (None, None)
    grown = [size for size in (machine, workers) if size is not None]
    if not grown or max(grown) < HOST_BYTES:
        return None
    named = len(grown) > 1
    return finding(
        "host_growth", grown=grown[0], workers=f"; the workers themselves by {size_text(workers)}" if named else ""
    )


# --- how near the limit it came ---


def headroom(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    room = [
        # Where other processes use it too, as on CPU, total less used is more than what is free.
        (point.total_bytes - point.used_bytes if point.free_bytes is None else point.free_bytes, point)
        for point in experiment.ranks(PEAK)
        if point.total_bytes and point.used_bytes is not None
    ]
    if not room:
        return None
    free, point = min(room, key=lambda each: each[0])
    image = max((each.bytes for cache in experiment.caches for each in cache.largest if each.bytes), default=None)
    # The host is shared with others, and PyTorch keeps no reserve there: how many images fit is no promise.
    images = free // image if image and not experiment.device.traits.is_host_memory else None
    ratio = free / (point.total_bytes or 1)
    is_tight = ratio < TIGHT_RATIO or (images is not None and images < FEW_IMAGES)
    return finding(
        "headroom",
        weight="likely" if is_tight else "note",
        advice=("gpu_memory_utilization", "limit_mm_per_prompt", "policy_earlier") if is_tight else (),
        rank=point.name,
        free=free,
        ratio=ratio,
        images=images,
        image=image,
        is_tight=is_tight,
    )


def transient_peak(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    over = experiment.change(AFTER, PEAK, "used_bytes")
    return None if over is None or over < TRANSIENT_BYTES else finding("transient_peak", over=over)


def unseen_peak(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    peaks = {point.key: point.torch.allocated_bytes for point in experiment.ranks(PEAK)}
    before = {point.key: point.torch.peak_allocated_bytes for point in experiment.ranks(BEFORE)}

    def unseen(point: RankReading) -> int | None:
        record, key = point.torch.peak_allocated_bytes, point.key
        earlier, seen = before.get(key), peaks.get(key)
        if record is None or earlier is None or seen is None:
            return None
        # A record from before the load is not of the load.
        return record - seen if record > earlier else None

    more, point = highest(experiment.ranks(AFTER), unseen) or (0, None)
    if point is None or more < TRANSIENT_BYTES:
        return None
    return finding("unseen_peak", advice=() if experiment.recorded else ("recorder_dir",), rank=point.name, more=more)


def over_high_water(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    if experiment.policy is None or experiment.policy.mode != "observe":
        return None
    under = [
        (high - free, rule, point, free, high)
        for rule in experiment.policy.rules
        for one in rule.ranks
        for point in experiment.ranks(PEAK)
        if point.key == one.key
        and (free := point.free_bytes) is not None
        and (high := one.high_free_bytes) is not None
        and free < high
    ]
    if not under:
        return None
    _, rule, point, free, high = max(under, key=lambda each: each[0])
    remedies = " or ".join(remedy.name for remedy in rule.remedies)
    return finding("over_high_water", rank=point.name, free=free, high=high, rule=rule.name, remedies=remedies)


def policy_acted(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    acted = [event for event in experiment.happened("reset") if event.trigger == "policy"]
    return finding("policy_acted", count=len(acted), freed=_freed(acted)) if acted else None


def others_acted(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    acted = [event for event in experiment.happened("reset") if event.trigger != "policy"]
    resets = _count(len(acted), "a reset", "resets")
    return finding("others_acted", resets=resets, freed=_freed(acted)) if acted else None


def _freed(events: Sequence[Event]) -> str:
    sizes = [event.result.credited_bytes for event in events if event.result is not None]
    known = [size for size in sizes if size is not None]
    return size_text(sum(known)) if known else "an unknown amount"


# --- what the remedies gave back ---


def ineffective_remedies(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    nothing = NOTHING_BYTES * max(len(experiment.ranks(BEFORE)), 1)
    ineffective = [
        step
        for step in experiment.remedies
        if step.outcome == "done" and step.freed_bytes is not None and step.freed_bytes < nothing
    ]
    if not ineffective:
        return None
    is_story = any(step.remedy == "reset_mm_cache" for step in ineffective)
    return finding(
        "ineffective_remedies",
        weight="clue" if is_story else "note",
        advice=("mm_processor_cache",) if is_story else (),
        names=_names(ineffective),
        reasons=_reasons(f"{step.remedy} frees {step.frees}, and not {step.does_not_free}" for step in ineffective),
    )


def refused_remedies(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    undone = [step for step in experiment.remedies if step.outcome in {"refused", "failed"}]
    if not undone:
        return None
    return finding(
        "refused_remedies",
        weight="clue" if any(step.outcome == "failed" for step in undone) else "note",
        names=_names(undone),
        reasons=_reasons(f"{step.remedy}: {step.reason or 'no reason was given'}" for step in undone),
    )


def gave_back(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    grown, relieved = case.grown_bytes, experiment.after_remedies
    left = experiment.change(BEFORE, relieved[-1].name, "used_bytes") if relieved else None
    if grown is None or not case.has_grown or left is None:
        return None
    back = grown - left
    freed, best = highest(experiment.remedies, lambda step: step.freed_bytes) or (0, None)
    came_back = f"{size_text(back)} of the growth of {size_text(grown)}"
    if back > grown:
        came_back = f"all of the growth of {size_text(grown)}"
        if back - grown > case.notable_bytes:
            came_back += f" and {size_text(back - grown)} that was held before"
    stayed = back < CAME_BACK_SHARE * grown
    rest, component = highest(COMPONENT_NAMES, lambda name: experiment.change(BEFORE, relieved[-1].name, name)) or (
        0,
        "",
    )
    return finding(
        "gave_back",
        weight="clue" if stayed else "note",
        advice=for_growth(component, case) if stayed and rest > 0 else (),
        stayed=stayed,
        came_back=came_back,
        most=f", most of it by {best.remedy} ({size_text(freed)})" if best is not None and freed else "",
        grown=grown,
        left=max(left, 0),
        back=back,
        rest=rest if rest > 0 else None,
        component=component_title(component) if component else "",
    )


def no_remedy(case: Case) -> Finding | None:
    experiment = given(case.experiment)
    return finding("no_remedy") if case.has_grown and not experiment.remedies else None


def _names(steps: Sequence[RemedyResult]) -> str:
    return f"{' and '.join(step.remedy for step in steps)} {'was' if len(steps) == 1 else 'were'}"


def _reasons(sentences: Iterable[str]) -> str:
    return " ".join(one if one.endswith((".", "!", "?")) else f"{one}." for one in sentences)


def _count(count: int, one: str, many: str) -> str:
    return one if count == 1 else f"{count} {many}"
