"""The rules for a measured load beside the rule book (`findings/rules.py`): the load, the peak, the remedies.

Each rule gives a finding, or nothing; what is not known answers no rule. Pure. A new rule is a function here and a line
in ``LOAD_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from highwater.accounting.attribution import COMPONENTS, rank_key
from highwater.findings import advice as known
from highwater.findings.case import name_of, risen, times, total
from highwater.findings.finding import Advice, Finding, weightiest_first
from highwater.findings.markdown import duration
from highwater.findings.rules import MAIN_SHARE, MINOR_SHARE, RULES, for_growth, meaning
from highwater.measure.experiment import AFTER, BEFORE, PEAK, Experiment, has_restarted, host_used, same_process
from highwater.readings import Event, RankReading
from highwater.text.table import component_title
from highwater.units import MIB, mib_text

TIGHT_RATIO = 0.05
HOST_BYTES = 512 * MIB
CAME_BACK_SHARE = 0.9
TRANSIENT_BYTES = 256 * MIB
FEW_IMAGES = 4
# Of each rank: what a remedy has freed that freed less is nothing.
NOTHING_BYTES = 16 * MIB
SHORT_SECONDS = 3.0

LoadRule: TypeAlias = Callable[[Experiment], Finding | None]


# --- whether the figures can be trusted ---


def load_failed(e: Experiment) -> Finding | None:
    """Report a load that ended otherwise than with 0."""
    if e.load.exit_code == 0 and not e.load.interrupted:
        return None
    how = f"with exit code {e.load.exit_code}" + (f" ({e.load.signal_name})" if e.load.signal_name else "")
    title = f"the load was interrupted after {duration(e.load.seconds)} and ended {how}"
    if not e.load.interrupted:
        title = f"the load failed {how} after {duration(e.load.seconds)}"
    text = "The figures are those of a load that did not come to its end: less may have been asked of the engine."
    if e.happened("incident"):
        text += " The sidecar wrote an incident meanwhile: see there what the engine had to do with it."
    return Finding(name="load_failed", weight="clue" if e.load.interrupted else "likely", title=title, text=text)


def engine_incident(e: Experiment) -> Finding | None:
    """Report an incident under the load."""
    incidents = e.happened("incident")
    if not incidents:
        return None
    return Finding(
        name="engine_incident",
        weight="likely",
        title=f"the engine had {_count(len(incidents), 'an incident', 'incidents')} under the load",
        text=f"{incidents[0].summary}. `highwater incidents` shows what was known of it, and what to change.",
    )


def engine_restarted(e: Experiment) -> Finding | None:
    """Report workers that are other processes at the end than at the start."""
    before, after = e.moment(BEFORE), e.last
    if before is None or after is None or not has_restarted(before, after):
        return None
    return Finding(
        name="engine_restarted",
        weight="likely",
        title="the engine's workers were replaced in between",
        text="Figures before and after that are of different processes: no growth is given from one to the other.",
    )


def stale_readings(e: Experiment) -> Finding | None:
    """Report times without a reading."""
    if not e.gaps:
        return None
    longest = e.gaps[0]
    return Finding(
        name="stale_readings",
        weight="clue",
        title=f"for {duration(longest.seconds)} under the load there was no reading",
        text=(
            f"{_count(len(e.gaps), 'One such gap', 'such gaps')}, the longest from "
            f"{duration(max(longest.start - e.load.started_at, 0))} after the start. What the memory did meanwhile is "
            "not known, and the peak may be higher than shown. The engine answers only between its steps; the workers' "
            "recorders (recorder_dir) write on in long ones."
        ),
    )


def no_traffic(e: Experiment) -> Finding | None:
    """Report that no request of the load was seen in the engine."""
    seen = [load.requests_running for at, load in e.traffic if e.load.started_at <= at <= e.load.ended_at]
    running = [count for count in seen if count is not None]
    grown = e.change(BEFORE, PEAK, "used_bytes")
    is_short = e.load.seconds < SHORT_SECONDS or len(running) < FEW_IMAGES
    if is_short or any(running) or grown is None or grown > e.case.notable_bytes:
        return None
    return Finding(
        name="no_traffic",
        weight="likely",
        title="no request was seen in this engine while the load ran",
        text=(
            f"In {len(running)} readings nothing ran or waited, and memory did not move. Does the command talk to this "
            f"sidecar or its engine ({e.engine.url})?"
        ),
    )


def other_traffic(e: Experiment) -> Finding | None:
    """Report that others asked the engine before or after the load."""
    start = next((load for at, load in reversed(e.traffic) if at <= e.load.started_at), None)
    end = next((load for at, load in e.traffic if at > e.load.ended_at), None)
    busy = [
        words
        for load, words in ((start, "before the load"), (end, "after it"))
        if load is not None and ((load.requests_running or 0) + (load.requests_waiting or 0))
    ]
    if not busy:
        return None
    return Finding(
        name="other_traffic",
        weight="clue",
        title=f"requests ran {' and '.join(busy)}",
        text="So not all that is shown here is this load's. For clean figures, measure while nobody else asks.",
    )


# --- what grew ---


def no_growth(e: Experiment) -> Finding | None:
    """Report that the load left nothing behind."""
    grown = e.case.grown_bytes
    if grown is None or grown > e.case.notable_bytes:
        return None
    return Finding(
        name="no_growth",
        weight="note",
        title=f"the load left next to nothing behind: used memory moved by {mib_text(grown, signed=True)}",
        text="After the load, used memory does not stand notably higher than before it.",
    )


def non_torch_growth(e: Experiment) -> Finding | None:
    """Report that what is not PyTorch's grew."""
    grown, total = e.change(BEFORE, AFTER, "non_torch_bytes"), e.case.grown_bytes
    if grown is None or total is None or grown <= e.case.notable_bytes or grown < MINOR_SHARE * total:
        return None
    if grown >= MAIN_SHARE * total:  # that is what the finding on growth says
        return None
    return Finding(
        name="non_torch_growth",
        weight="clue",
        title=f"what is not PyTorch's grew by {mib_text(grown)}",
        text=meaning("non_torch_bytes", e.device.type),
        advice=(known.RELEASE, *known.for_component("non_torch_bytes", e.device.type)),
    )


def kv_pool(e: Experiment) -> Finding | None:
    """Report the KV pool, which should be as large as before."""
    pool = total(rank.components.kv_cache_bytes for rank in e.ranks(AFTER))
    moved = e.change(BEFORE, AFTER, "kv_cache_bytes")
    if pool is None or moved is None:
        return None
    if moved:
        return Finding(
            name="kv_pool",
            weight="clue",
            title=f"the KV pool changed by {mib_text(moved, signed=True)}",
            text=known.COMPONENT_MEANING["kv_cache_bytes"],
        )
    return Finding(
        name="kv_pool",
        weight="note",
        title=f"the KV pool is {mib_text(pool)}, before and after, by design",
        text=(
            "vLLM allocates it whole at start: a full KV cache takes no more of the device, and reset_prefix_cache "
            "gives none of it back. Only a restart with a lower --gpu-memory-utilization makes it smaller."
        ),
    )


def host_growth(e: Experiment) -> Finding | None:
    """Report that host memory grew, where that is not the device itself."""
    if e.device.type == "cpu":
        return None
    pairs = [(same_process(e.ranks(BEFORE), now), now) for now in e.ranks(AFTER)]
    grown = total(risen(first, now, lambda each: each.host_memory.rss_bytes) for first, now in pairs)
    whole = [risen(first, now, host_used) for first, now in pairs]
    # Ranks of one machine have the same figure: the largest stands for it.
    machine = max((moved for moved in whole if moved is not None), default=None)
    most = max((moved for moved in (grown, machine) if moved is not None), default=None)
    if most is None or most < HOST_BYTES:
        return None
    workers = f"; the workers themselves by {mib_text(grown)}" if grown is not None and machine is not None else ""
    return Finding(
        name="host_growth",
        weight="clue",
        title=f"host memory grew by {mib_text(machine if machine is not None else most)} under the load{workers}",
        text=(
            "Processed images are kept on the host (the multimodal processor cache), and what a trim moved out of the "
            "device lies there too. Neither holds device memory."
        ),
        advice=(known.MM_PROCESSOR_CACHE, known.RESET_MM_CACHE),
    )


# --- how near the limit it came ---


def headroom(e: Experiment) -> Finding | None:
    """Report what was left of the fullest device at its peak, in images where one is known."""
    room = [
        (point.total_bytes - point.used_bytes, point)
        for point in e.ranks(PEAK)
        if point.total_bytes and point.used_bytes is not None
    ]
    if not room:
        return None
    free, point = min(room, key=lambda each: each[0])
    image = _largest_output(e)
    images = free // image if image else None
    # The host is shared with others, and PyTorch keeps no reserve there: how many images fit is no promise.
    more = (
        f": room for {images:,} more cached images of the largest size seen ({mib_text(image)} each)"
        if image and images is not None and e.device.type != "cpu"
        else ""
    )
    ratio = free / (point.total_bytes or 1)
    is_tight = ratio < TIGHT_RATIO or (e.device.type != "cpu" and images is not None and images < FEW_IMAGES)
    return Finding(
        name="headroom",
        weight="likely" if is_tight else "note",
        title=f"at the peak {name_of(point)} had {mib_text(free)} left ({ratio:.1%}){more}",
        text=(
            "Whoever asks for more than that gets none: PyTorch, and also what it does not manage, such as operators' "
            "workspaces. A peak between two readings may have been higher."
            if is_tight
            else "As far as the readings show, this load fits."
        ),
        advice=(known.GPU_MEMORY_UTILIZATION, known.LIMIT_MM_PER_PROMPT, known.POLICY_EARLIER) if is_tight else (),
    )


def transient_peak(e: Experiment) -> Finding | None:
    """Report a peak that stood well over what was left after the load."""
    over = e.change(AFTER, PEAK, "used_bytes")
    if over is None or over < TRANSIENT_BYTES:
        return None
    return Finding(
        name="transient_peak",
        weight="note",
        title=f"the peak stood {mib_text(over)} over what the load left behind",
        text="That much is needed on the way, and given back by itself: plan with the peak, not with what is left.",
    )


def unseen_peak(e: Experiment) -> Finding | None:
    """Report that PyTorch's own record of its peak is higher than any reading."""
    peaks = {rank_key(point): point.torch.allocated_bytes for point in e.ranks(PEAK)}
    before = {rank_key(point): point.torch.peak_allocated_bytes for point in e.ranks(BEFORE)}
    unseen: list[tuple[int, RankReading]] = []
    for point in e.ranks(AFTER):
        record, earlier, seen = (
            point.torch.peak_allocated_bytes,
            before.get(rank_key(point)),
            peaks.get(rank_key(point)),
        )
        # A record of before the load says nothing of it.
        if record is not None and earlier is not None and seen is not None and record > earlier:
            unseen.append((record - seen, point))
    if not unseen:
        return None
    most, point = max(unseen, key=lambda each: each[0])
    if most < TRANSIENT_BYTES:
        return None
    return Finding(
        name="unseen_peak",
        weight="clue",
        title=f"between two readings {name_of(point)} had {mib_text(most)} more allocated than any reading shows",
        text=(
            "PyTorch keeps a record of its own peak, and the load raised it. What of it came out of the allocator's "
            "reserve is in the used bytes; as far as it did not, the peak shown here is too low."
        ),
        advice=() if e.recorded else (_RECORDER,),
    )


_RECORDER: Final = Advice(
    setting="recorder_dir",
    change="The workers' recorders write ten times a second, also within long steps.",
    cost="A folder that sidecar and workers share; some kilobytes a second into memory.",
)


def over_high_water(e: Experiment) -> Finding | None:
    """Report a peak that left less free than a rule's high water while the policy only observed."""
    if e.policy is None or e.policy.mode != "observe":
        return None
    under = [
        (high - free, rule, point, free, high)
        for rule in e.policy.rules
        for one in rule.ranks
        for point in e.ranks(PEAK)
        if rank_key(point) == rank_key(one)
        and (free := point.free_bytes) is not None
        and (high := one.high_free_bytes) is not None
        and free < high
    ]
    if not under:
        return None
    _, rule, point, free, high = max(under, key=lambda each: each[0])
    remedies = " or ".join(remedy.name for remedy in rule.remedies)
    return Finding(
        name="over_high_water",
        weight="clue",
        title=f"{name_of(point)} had {mib_text(free)} free at the peak, less than high water ({mib_text(high)}), and "
        "the policy only observes",
        text=f"In mode act the rule {rule.name} would have run {remedies}, where that could give something back.",
        advice=(known.POLICY_EARLIER,),
    )


def policy_acted(e: Experiment) -> Finding | None:
    """Report that the policy gave memory back in between: growth and peak are lower for it."""
    acted = [event for event in e.happened("reset") if event.trigger == "policy"]
    if not acted:
        return None
    return Finding(
        name="policy_acted",
        weight="note",
        title=f"the policy acted {times(len(acted))} under the load and freed {_freed(acted)}",
        text="Growth and peak are what was left of it: without the policy they would be higher.",
    )


def others_acted(e: Experiment) -> Finding | None:
    """Report that somebody reset something while the load ran."""
    acted = [event for event in e.happened("reset") if event.trigger != "policy"]
    if not acted:
        return None
    count = _count(len(acted), "a reset", "resets")
    return Finding(
        name="others_acted",
        weight="clue",
        title=f"somebody asked for {count} while the load ran, which freed {_freed(acted)}",
        text="Growth and peak are what was left of it.",
    )


# --- what the remedies gave back ---


def ineffective_remedies(e: Experiment) -> Finding | None:
    """Report the remedies that were done and freed nothing."""
    nothing = NOTHING_BYTES * max(len(e.ranks(BEFORE)), 1)
    done = [step for step in e.remedies if step.outcome == "done" and step.freed_bytes is not None]
    ineffective = [step for step in done if (step.freed_bytes or 0) < nothing]
    if not ineffective:
        return None
    names = " and ".join(step.remedy for step in ineffective)
    reasons = " ".join(
        _sentence(f"{step.remedy} frees {step.frees}, and not {step.does_not_free}") for step in ineffective
    )
    return Finding(
        name="ineffective_remedies",
        weight="clue" if any(step.remedy == "reset_mm_cache" for step in ineffective) else "note",
        title=f"{names} {'was' if len(ineffective) == 1 else 'were'} done and freed nothing on the device",
        text=f"The engine answered well each time, which says nothing of memory. {reasons}",
        advice=(known.MM_PROCESSOR_CACHE,) if any(step.remedy == "reset_mm_cache" for step in ineffective) else (),
    )


def refused_remedies(e: Experiment) -> Finding | None:
    """Report the remedies that were refused or failed, and why."""
    undone = [step for step in e.remedies if step.outcome in {"refused", "failed"}]
    if not undone:
        return None
    reasons = " ".join(_sentence(f"{step.remedy}: {step.reason or 'no reason was given'}") for step in undone)
    return Finding(
        name="refused_remedies",
        weight="clue" if any(step.outcome == "failed" for step in undone) else "note",
        title=f"{' and '.join(step.remedy for step in undone)} {'was' if len(undone) == 1 else 'were'} not done",
        text=f"{reasons} Safe mode refuses what would harm a request or hang this engine version.",
    )


def gave_back(e: Experiment) -> Finding | None:
    """Report what came back of the growth, and where the rest is."""
    grown = e.case.grown_bytes
    last = e.last
    if grown is None or grown <= e.case.notable_bytes or last is None or not last.name.startswith("after "):
        return None
    left = e.change(BEFORE, last.name, "used_bytes")
    if left is None:
        return None
    back = grown - left
    best = max((step for step in e.remedies if step.freed_bytes), key=lambda step: step.freed_bytes or 0, default=None)
    most = f", most of it by {best.remedy} ({mib_text(best.freed_bytes or 0)})" if best is not None else ""
    if back >= CAME_BACK_SHARE * grown:
        came_back = f"{mib_text(back)} of the growth of {mib_text(grown)}"
        if back > grown:
            came_back = f"all of the growth of {mib_text(grown)}"
            came_back += (
                f" and {mib_text(back - grown)} that was held before" if back - grown > e.case.notable_bytes else ""
            )
        return Finding(
            name="gave_back",
            weight="note",
            title=f"the remedies gave back {came_back}{most}",
            text="What grew was kept for the next request, and nothing leaked. It grows again when it is needed.",
        )
    parts = [(part, name) for name in COMPONENTS if (part := e.change(BEFORE, last.name, name)) is not None]
    rest, name = max(parts, default=(0, ""))
    where = f" Of what stayed, {mib_text(rest)} are in {component_title(name)}."
    return Finding(
        name="gave_back",
        weight="clue",
        title=f"of the growth of {mib_text(grown)}, {mib_text(max(left, 0))} did not come back",
        text=f"The remedies gave back {mib_text(back)}{most}.{where if rest > 0 else ''}",
        advice=for_growth(name, e.device.type) if rest > 0 else (),
    )


def no_remedy(e: Experiment) -> Finding | None:
    """Report that no remedy was tried."""
    grown = e.case.grown_bytes
    if e.remedies or grown is None or grown <= e.case.notable_bytes:
        return None
    return Finding(
        name="no_remedy",
        weight="note",
        title="no remedy was tried, so what would come back is not known",
        text="`highwater measure --remedies all` tries them one by one, in safe mode, and says what each gave back.",
    )


LOAD_RULES: Final[tuple[LoadRule, ...]] = (
    load_failed,
    engine_incident,
    engine_restarted,
    no_traffic,
    headroom,
    no_growth,
    ineffective_remedies,
    gave_back,
    refused_remedies,
    non_torch_growth,
    host_growth,
    over_high_water,
    unseen_peak,
    stale_readings,
    other_traffic,
    others_acted,
    policy_acted,
    transient_peak,
    kv_pool,
    no_remedy,
)


def findings(e: Experiment) -> tuple[Finding, ...]:
    """Everything that the numbers say, the weightiest first; advice that this engine cannot follow is left out."""
    asked = (*(rule(e.case) for rule in RULES), *(rule(e) for rule in LOAD_RULES))
    found = weightiest_first(finding for finding in asked if finding is not None)
    return tuple(known.possible(finding, e.engine) for finding in found)


def _count(count: int, one: str, many: str) -> str:
    return one if count == 1 else f"{count} {many}"


def _largest_output(e: Experiment) -> int | None:
    return max((each.bytes for cache in e.caches for each in cache.largest if each.bytes), default=None)


def _freed(events: Sequence[Event]) -> str:
    freed = [event.result.freed_bytes for event in events if event.result is not None]
    known_bytes = [each for each in freed if each is not None]
    return mib_text(sum(known_bytes)) if known_bytes else "an unknown amount"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
