"""What an experiment's numbers say: each rule takes its values, and gives a sentence and advice, or nothing. Pure.

A new rule is a function here and a line in ``RULES``. What is not known answers no rule: a finding never rests on a
``None``. The advice is the black box's (``app.incidents.advice``): the same setting is told the same way everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from app.attribution import COMPONENTS
from app.experiment.experiment import (
    AFTER,
    BEFORE,
    PEAK,
    Experiment,
    Happened,
    RankPoint,
    RemedyStep,
    changes,
    has_restarted,
)
from app.incidents import advice as known
from app.incidents.incident import Advice
from app.incidents.text import duration
from app.table import component_title
from app.units import GIB, MIB

# Of every rank: less than that moves by itself.
NOTABLE_BYTES = 32 * MIB
# Of a rank's device: reserved and not allocated, and beyond what an allocator keeps in its ordinary course.
UNUSED_BYTES, UNUSED_RATIO = 1024 * MIB, 0.03
TIGHT_RATIO = 0.05
SKEW_BYTES, SKEW_RATIO = 512 * MIB, 0.02
HOST_BYTES = 512 * MIB
MAIN_SHARE, MINOR_SHARE = 0.6, 0.1
CAME_BACK_SHARE = 0.9
TRANSIENT_BYTES = 256 * MIB
FEW_IMAGES = 4
SHORT_SECONDS = 3.0

Weight: TypeAlias = Literal["act", "look", "note"]
_WEIGHTS: Final[tuple[Weight, ...]] = ("act", "look", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the numbers say.

    Attributes:
        name: A word for programs.
        weight: ``act``: change something. ``look``: it may matter. ``note``: good to know.
        title: A sentence without its full stop.
        text: What it rests on, and what it means.
        advice: What can be changed.
    """

    name: str
    weight: Weight
    title: str
    text: str
    advice: tuple[Advice, ...] = ()

    @property
    def sentence(self) -> str:
        """The title with a capital, unless it begins with a name."""
        first = self.title.partition(" ")[0]
        return self.title if "_" in first else self.title[:1].upper() + self.title[1:]


Rule: TypeAlias = Callable[[Experiment], Finding | None]


def size(count: int, *, signed: bool = False) -> str:
    """Bytes for a sentence: GiB with two decimals from one on, MiB below."""
    sign = "+" if signed else ""
    if abs(count) >= GIB:
        return f"{count / GIB:{sign},.2f} GiB"
    return f"{count / MIB:{sign},.0f} MiB" if abs(count) >= 10 * MIB or count == 0 else f"{count / MIB:{sign},.1f} MiB"


# --- whether the figures can be trusted ---


def load_failed(e: Experiment) -> Finding | None:
    """Whether the load ended otherwise than with 0."""
    if e.load.exit_code == 0 and not e.load.interrupted:
        return None
    how = f"with exit code {e.load.exit_code}" + (f" ({e.load.signal_name})" if e.load.signal_name else "")
    title = f"the load was interrupted after {duration(e.load.seconds)} and ended {how}"
    if not e.load.interrupted:
        title = f"the load failed {how} after {duration(e.load.seconds)}"
    text = "The figures are those of a load that did not come to its end: less may have been asked of the engine."
    if e.happened("incident"):
        text += " The sidecar wrote an incident meanwhile: see there what the engine had to do with it."
    return Finding(name="load_failed", weight="look" if e.load.interrupted else "act", title=title, text=text)


def engine_incident(e: Experiment) -> Finding | None:
    """Whether the black box wrote something down."""
    incidents = e.happened("incident")
    if not incidents:
        return None
    return Finding(
        name="engine_incident",
        weight="act",
        title=f"the engine had {_times(len(incidents), 'an incident', 'incidents')} under the load",
        text=f"{incidents[0].summary}. `highwater incidents` tells what was known of it, and what to change.",
    )


def engine_restarted(e: Experiment) -> Finding | None:
    """Whether the workers are others at the end than at the start."""
    before, after = e.moment(BEFORE), e.last
    if before is None or after is None or not has_restarted(before, after):
        return None
    return Finding(
        name="engine_restarted",
        weight="act",
        title="the engine's workers were replaced in between",
        text="Figures before and after that are of different processes: no growth is told from one to the other.",
    )


def stale_readings(e: Experiment) -> Finding | None:
    """Whether there were times without a reading."""
    if not e.gaps:
        return None
    longest = e.gaps[0]
    return Finding(
        name="stale_readings",
        weight="look",
        title=f"for {duration(longest.seconds)} under the load there was no reading",
        text=(
            f"{_times(len(e.gaps), 'One such gap', 'such gaps')}, the longest from "
            f"{duration(max(longest.start - e.load.started_at, 0))} after the start. What the memory did meanwhile is "
            "not known, and the peak may be higher than shown. The engine answers only between its steps; the workers' "
            "recorders (recorder_dir) write on in long ones."
        ),
    )


def no_traffic(e: Experiment) -> Finding | None:
    """Whether any request of the load was seen in the engine."""
    seen = [each.running for each in e.traffic if e.load.started_at <= each.at <= e.load.ended_at]
    told = [running for running in seen if running is not None]
    grown = e.change(BEFORE, PEAK, "used_bytes")
    is_short = e.load.seconds < SHORT_SECONDS or len(told) < FEW_IMAGES
    if is_short or any(told) or grown is None or grown > _notable(e):
        return None
    return Finding(
        name="no_traffic",
        weight="act",
        title="no request was seen in this engine while the load ran",
        text=(
            f"In {len(told)} readings nothing ran or waited, and memory did not move. Does the command talk to this "
            f"sidecar or its engine ({e.engine.url})?"
        ),
    )


def other_traffic(e: Experiment) -> Finding | None:
    """Whether others asked the engine before or after the load."""
    start = next((each for each in reversed(e.traffic) if each.at <= e.load.started_at), None)
    end = next((each for each in e.traffic if each.at > e.load.ended_at), None)
    busy = [
        words
        for each, words in ((start, "before the load"), (end, "after it"))
        if each is not None and ((each.running or 0) + (each.waiting or 0))
    ]
    if not busy:
        return None
    return Finding(
        name="other_traffic",
        weight="look",
        title=f"requests ran {' and '.join(busy)}",
        text="So not all that is told here is this load's. For clean figures, record while nobody else asks.",
    )


# --- what grew ---


def growth(e: Experiment) -> Finding | None:
    """How much used memory grew under the load, and what that is made of."""
    grown = e.change(BEFORE, AFTER, "used_bytes")
    if grown is None:
        return None
    if grown <= _notable(e):
        moved = "as before" if grown > -_notable(e) else f"{size(-grown)} lower"
        return Finding(
            name="growth",
            weight="note",
            title=f"the load left nothing behind: used memory is {moved}",
            text="After the load, used memory does not stand higher than before it.",
        )
    parts = [(part, name) for name in COMPONENTS if (part := e.change(BEFORE, AFTER, name)) is not None and part > 0]
    if not parts:
        return Finding(
            name="growth",
            weight="look",
            title=f"the load left {size(grown)} behind",
            text="Which component it is in is not known.",
        )
    largest, name = max(parts)
    told = " and ".join(_share(part, grown, of) for part, of in sorted(parts, reverse=True)[:2] if _counts(part, grown))
    text = _meaning(e, name)
    if largest >= MAIN_SHARE * grown:
        told = _share(largest, grown, name) + _REACH.get(name, "")
        rest = [_share(part, grown, of) for part, of in sorted(parts, reverse=True)[1:] if _counts(part, grown)]
        text = f"The rest: {', '.join(rest)}. {text}" if rest else text
    return Finding(
        name="growth",
        weight="look",
        title=f"the load's growth of {size(grown)} over {_ranks(e)} is {told}",
        text=text,
        advice=_for_component(e, name),
    )


_REACH: Final[Mapping[str, str]] = {
    "encoder_cache_bytes": ", which reset_mm_cache does not touch; trim or reset the encoder cache",
    "other_tensors_bytes": ", live tensors of PyTorch, which no remedy takes away",
    "torch_cached_bytes": ", which reset_mm_cache does not touch; release gives back what of it is releasable",
    "non_torch_bytes": ", which is not PyTorch's; release gives back what of it is the allocator's or a workspace's",
}


def encoder_plateau(e: Experiment) -> Finding | None:
    """Whether the encoder cache stands at its budget, where it stays."""
    cache = next((each for each in e.caches if each.title == "after the load"), None)
    if cache is None or not cache.capacity_embeds or not cache.entries or not cache.device_bytes:
        return None
    sized = [(each.bytes, each.embeds) for each in cache.largest if each.bytes and each.embeds]
    if not sized:
        return None
    bytes_, embeds = (sum(parts) for parts in zip(*sized, strict=True))
    budget = int(cache.capacity_embeds * bytes_ / embeds)
    fill = cache.device_bytes / budget
    if fill < 1 - MINOR_SHARE:
        title = f"the encoder cache is {fill:.0%} full and can grow by {size(budget - cache.device_bytes)} more"
        text = f"Its budget of {cache.capacity_embeds:,} embeddings comes to about {size(budget)} on every rank. "
    else:
        title = f"the encoder cache stands at its budget ({size(cache.device_bytes)} of about {size(budget)} a rank)"
        text = "More load makes it no larger. "
    return Finding(
        name="encoder_plateau",
        weight="note",
        title=title,
        text=text + known.COMPONENT_MEANING["encoder_cache_bytes"],
        advice=(known.MAX_NUM_BATCHED_TOKENS,),
    )


def fragmentation(e: Experiment) -> Finding | None:
    """Whether PyTorch's allocator holds much that no tensor uses."""
    held = [(point.components.torch_cached_bytes or 0, point) for point in _points(e, AFTER)]
    unused, point = max(held, key=lambda each: each[0], default=(0, None))
    if point is None or unused < max(UNUSED_BYTES, int(UNUSED_RATIO * (point.total_bytes or 0))):
        return None
    torch = point.torch
    split = f" {size(torch.inactive_split_bytes)} of it lie beside live tensors." if torch.inactive_split_bytes else ""
    reserved = (
        f"{size(torch.reserved_bytes)} reserved, {size(torch.allocated_bytes)} allocated. "
        if torch.reserved_bytes is not None and torch.allocated_bytes is not None
        else ""
    )
    return Finding(
        name="fragmentation",
        weight="look",
        title=f"PyTorch's allocator holds {size(unused)} on {point.name} that no tensor uses",
        text=f"{reserved}{known.COMPONENT_MEANING['torch_cached_bytes']}{split}",
        advice=(known.RELEASE, *known.against_fragmentation(e.device.type)),
    )


def non_torch_growth(e: Experiment) -> Finding | None:
    """Whether what is not PyTorch's grew."""
    grown, total = e.change(BEFORE, AFTER, "non_torch_bytes"), e.change(BEFORE, AFTER, "used_bytes")
    if grown is None or total is None or grown <= _notable(e) or not _counts(grown, total):
        return None
    if grown >= MAIN_SHARE * total:  # that is what the finding on growth says
        return None
    return Finding(
        name="non_torch_growth",
        weight="look",
        title=f"what is not PyTorch's grew by {size(grown)}",
        text=_meaning(e, "non_torch_bytes"),
        advice=(known.RELEASE, *known.for_component("non_torch_bytes", e.device.type)),
    )


def kv_pool(e: Experiment) -> Finding | None:
    """Whether the KV pool is as large as before, as it should be."""
    pool, moved = _total(e, AFTER, "kv_cache_bytes"), e.change(BEFORE, AFTER, "kv_cache_bytes")
    if pool is None or moved is None:
        return None
    if moved:
        return Finding(
            name="kv_pool",
            weight="look",
            title=f"the KV pool changed by {size(moved, signed=True)}",
            text=known.COMPONENT_MEANING["kv_cache_bytes"],
        )
    return Finding(
        name="kv_pool",
        weight="note",
        title=f"the KV pool is {size(pool)}, before and after, by design",
        text=(
            "vLLM allocates it whole at start: a full KV cache takes no more of the device, and reset_prefix_cache "
            "gives none of it back. Only a restart with a lower --gpu-memory-utilization makes it smaller."
        ),
    )


def host_growth(e: Experiment) -> Finding | None:
    """Whether host memory grew, where that is not the device itself."""
    if e.device.type == "cpu":
        return None
    grown = e.change(BEFORE, AFTER, "host_rss_bytes")
    before, after = e.moment(BEFORE), e.moment(AFTER)
    whole = [*changes(before, after, "host_used_bytes").values()] if before and after else []
    # Ranks of one machine tell the same figure: the largest stands for it.
    machine = max((moved for moved in whole if moved is not None), default=None)
    most = max((moved for moved in (grown, machine) if moved is not None), default=None)
    if most is None or most < HOST_BYTES:
        return None
    workers = f"; the workers themselves by {size(grown)}" if grown is not None and machine is not None else ""
    return Finding(
        name="host_growth",
        weight="look",
        title=f"host memory grew by {size(machine if machine is not None else most)} under the load{workers}",
        text=(
            "Processed images are kept on the host (the multimodal processor cache), and what a trim moved out of the "
            "device lies there too. Neither holds device memory."
        ),
        advice=(known.MM_PROCESSOR_CACHE, known.RESET_MM_CACHE),
    )


def skew(e: Experiment) -> Finding | None:
    """Whether one rank uses much more than another."""
    told = sorted(
        ((point.used_bytes, point.name, point) for point in _points(e, PEAK) if point.used_bytes is not None),
        key=lambda each: each[0],
    )
    if len(told) < 2:  # noqa: PLR2004 - one rank is not skewed against anything
        return None
    (least, lightest, low), (most, heaviest, high) = told[0], told[-1]
    if most - least < max(SKEW_BYTES, int(SKEW_RATIO * (high.total_bytes or 0))):
        return None
    parts = [
        (mine - other, name)
        for name in COMPONENTS
        if (mine := high.part(name)) is not None and (other := low.part(name)) is not None
    ]
    where = f" Most of the difference is in {component_title(max(parts)[1])}." if parts and max(parts)[0] > 0 else ""
    return Finding(
        name="skew",
        weight="look",
        title=f"at its peak {heaviest} used {size(most - least)} more than {lightest}",
        text=f"The fullest rank runs out first and takes the others with it.{where}",
        advice=(known.OTHER_PROCESSES,),
    )


# --- how near the limit it came ---


def headroom(e: Experiment) -> Finding | None:
    """What was left of the fullest device at its peak, in images where one is known."""
    room = [
        (point.total_bytes - point.used_bytes, point)
        for point in _points(e, PEAK)
        if point.total_bytes and point.used_bytes is not None
    ]
    if not room:
        return None
    free, point = min(room, key=lambda each: each[0])
    image = _largest_output(e)
    images = free // image if image else None
    # The host is shared with others, and PyTorch keeps no reserve there: how many images fit is no promise.
    more = (
        f": room for {images:,} more cached images of the largest size seen ({size(image)} each)"
        if image and images is not None and e.device.type != "cpu"
        else ""
    )
    ratio = free / (point.total_bytes or 1)
    is_tight = ratio < TIGHT_RATIO or (e.device.type != "cpu" and images is not None and images < FEW_IMAGES)
    return Finding(
        name="headroom",
        weight="act" if is_tight else "note",
        title=f"at the peak {point.name} had {size(free)} left ({ratio:.1%}){more}",
        text=(
            "Whoever asks for more than that gets none: PyTorch, and also what it does not manage, such as operators' "
            "workspaces. A peak between two readings may have been higher."
            if is_tight
            else "As far as readings can tell, this load fits."
        ),
        advice=(known.GPU_MEMORY_UTILIZATION, known.LIMIT_MM_PER_PROMPT, known.POLICY_EARLIER) if is_tight else (),
    )


def transient_peak(e: Experiment) -> Finding | None:
    """Whether the peak stood well over what was left after the load."""
    over = e.change(AFTER, PEAK, "used_bytes")
    if over is None or over < TRANSIENT_BYTES:
        return None
    return Finding(
        name="transient_peak",
        weight="note",
        title=f"the peak stood {size(over)} over what the load left behind",
        text="That much is needed on the way, and given back by itself: plan with the peak, not with what is left.",
    )


def unseen_peak(e: Experiment) -> Finding | None:
    """Whether PyTorch's own record of its peak is higher than any reading."""
    peaks = {point.key: point.torch.allocated_bytes for point in _points(e, PEAK)}
    before = {point.key: point.torch.peak_allocated_bytes for point in _points(e, BEFORE)}
    unseen: list[tuple[int, RankPoint]] = []
    for point in _points(e, AFTER):
        record, earlier, seen = point.torch.peak_allocated_bytes, before.get(point.key), peaks.get(point.key)
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
        weight="look",
        title=f"between two readings {point.name} had {size(most)} more allocated than any reading shows",
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


def allocator_trouble(e: Experiment) -> Finding | None:
    """Whether PyTorch's allocator ran out, and tried again or gave up."""
    before = {point.key: point.torch for point in _points(e, BEFORE)}
    retries = ooms = 0
    for point in _points(e, AFTER):
        earlier = before.get(point.key)
        if earlier is not None:
            retries += max((point.torch.alloc_retries or 0) - (earlier.alloc_retries or 0), 0)
            ooms += max((point.torch.ooms or 0) - (earlier.ooms or 0), 0)
    if not retries and not ooms:
        return None
    happened = [f"tried again {_times(retries, 'once', 'times')}"] if retries else []
    happened += [f"gave up {_times(ooms, 'once', 'times')}"] if ooms else []
    return Finding(
        name="allocator_trouble",
        weight="act",
        title=f"PyTorch's allocator ran out of memory under the load and {' and '.join(happened)}",
        text=(
            "It got no memory, gave back what it held in vain, and tried again: that costs a step its pace, and is the "
            "early warning before the error that ends the engine."
        ),
        advice=(
            known.GPU_MEMORY_UTILIZATION,
            *known.against_fragmentation(e.device.type),
            known.LIMIT_MM_PER_PROMPT,
            known.MAX_NUM_BATCHED_TOKENS,
        ),
    )


def over_high_water(e: Experiment) -> Finding | None:
    """Whether the peak left less free than a rule's high water while the policy was told only to look."""
    if e.policy_mode != "observe":
        return None
    under = [
        (high - free, rule, point, free, high)
        for rule in e.rules
        for point in _points(e, PEAK)
        if (free := point.free_bytes) is not None
        and (high := rule.high_free.get(point.key)) is not None
        and free < high
    ]
    if not under:
        return None
    _, rule, point, free, high = max(under, key=lambda each: each[0])
    return Finding(
        name="over_high_water",
        weight="look",
        title=f"{point.name} had {size(free)} free at the peak, less than high water ({size(high)}), and the "
        "policy only observes",
        text=f"In mode act the rule {rule.name} would have run {' or '.join(rule.remedies)}, where that could give "
        "something back.",
        advice=(known.POLICY_EARLIER,),
    )


def policy_acted(e: Experiment) -> Finding | None:
    """Whether the policy gave memory back in between: then growth and peak are lower than they would have been."""
    acted = [event for event in e.happened("reset") if event.trigger == "policy"]
    if not acted:
        return None
    return Finding(
        name="policy_acted",
        weight="note",
        title=f"the policy acted {_times(len(acted), 'once', 'times')} under the load and freed {_freed(acted)}",
        text="Growth and peak are what was left of it: without the policy they would be higher.",
    )


def others_acted(e: Experiment) -> Finding | None:
    """Whether somebody reset something while the load ran."""
    acted = [event for event in e.happened("reset") if event.trigger != "policy"]
    if not acted:
        return None
    count = _times(len(acted), "a reset", "resets")
    return Finding(
        name="others_acted",
        weight="look",
        title=f"somebody asked for {count} while the load ran, which freed {_freed(acted)}",
        text="Growth and peak are what was left of it.",
    )


# --- what the remedies gave back ---


def ineffective_remedies(e: Experiment) -> Finding | None:
    """Which remedies were done and freed nothing."""
    ineffective = [step for step in e.steps if step.outcome == "done" and _is_nothing(e, step)]
    if not ineffective:
        return None
    names = " and ".join(step.remedy for step in ineffective)
    reasons = " ".join(
        _sentence(f"{step.remedy} frees {step.frees}, and not {step.does_not_free}") for step in ineffective
    )
    return Finding(
        name="ineffective_remedies",
        weight="look" if any(step.remedy == "reset_mm_cache" for step in ineffective) else "note",
        title=f"{names} {'was' if len(ineffective) == 1 else 'were'} done and freed nothing on the device",
        text=f"The engine answered well each time, which says nothing of memory. {reasons}",
        advice=(known.MM_PROCESSOR_CACHE,) if any(step.remedy == "reset_mm_cache" for step in ineffective) else (),
    )


def refused_remedies(e: Experiment) -> Finding | None:
    """Which remedies were refused or failed, and why."""
    undone = [step for step in e.steps if step.outcome in {"refused", "failed"}]
    if not undone:
        return None
    reasons = " ".join(_sentence(f"{step.remedy}: {step.reason or 'no reason was given'}") for step in undone)
    return Finding(
        name="refused_remedies",
        weight="look" if any(step.outcome == "failed" for step in undone) else "note",
        title=f"{' and '.join(step.remedy for step in undone)} {'was' if len(undone) == 1 else 'were'} not done",
        text=f"{reasons} Safe mode refuses what would harm a request or hang this engine version.",
    )


def gave_back(e: Experiment) -> Finding | None:
    """What came back of the growth, and where the rest is."""
    grown = e.change(BEFORE, AFTER, "used_bytes")
    last = e.last
    if grown is None or grown <= _notable(e) or last is None or not last.name.startswith("after "):
        return None
    left = e.change(BEFORE, last.name, "used_bytes")
    if left is None:
        return None
    back = grown - left
    best = max((step for step in e.steps if step.freed_bytes), key=lambda step: step.freed_bytes or 0, default=None)
    most = f", most of it by {best.remedy} ({size(best.freed_bytes or 0)})" if best is not None else ""
    if back >= CAME_BACK_SHARE * grown:
        told = f"{size(back)} of the growth of {size(grown)}"
        if back > grown:
            told = f"all of the growth of {size(grown)}"
            told += f" and {size(back - grown)} that was held before" if back - grown > _notable(e) else ""
        return Finding(
            name="gave_back",
            weight="note",
            title=f"the remedies gave back {told}{most}",
            text="What grew was kept for the next request, and nothing leaked. It grows again when it is needed.",
        )
    parts = [(part, name) for name in COMPONENTS if (part := e.change(BEFORE, last.name, name)) is not None]
    rest, name = max(parts, default=(0, ""))
    where = f" Of what stayed, {size(rest)} are in {component_title(name)}."
    return Finding(
        name="gave_back",
        weight="look",
        title=f"of the growth of {size(grown)}, {size(max(left, 0))} did not come back",
        text=f"The remedies gave back {size(back)}{most}.{where if rest > 0 else ''}",
        advice=_for_component(e, name) if rest > 0 else (),
    )


def no_remedy(e: Experiment) -> Finding | None:
    """Whether it was not tried what comes back."""
    grown = e.change(BEFORE, AFTER, "used_bytes")
    if e.steps or grown is None or grown <= _notable(e):
        return None
    return Finding(
        name="no_remedy",
        weight="note",
        title="no remedy was tried, so what would come back is not known",
        text="`highwater record --remedies all` tries them one by one, in safe mode, and tells what each gave back.",
    )


RULES: Final[tuple[Rule, ...]] = (
    load_failed,
    engine_incident,
    engine_restarted,
    no_traffic,
    allocator_trouble,
    headroom,
    growth,
    ineffective_remedies,
    gave_back,
    refused_remedies,
    fragmentation,
    non_torch_growth,
    host_growth,
    skew,
    over_high_water,
    unseen_peak,
    stale_readings,
    other_traffic,
    others_acted,
    policy_acted,
    encoder_plateau,
    transient_peak,
    kv_pool,
    no_remedy,
)


def findings(experiment: Experiment) -> tuple[Finding, ...]:
    """Everything that the numbers say, the weightiest first; advice that this engine cannot follow is left out."""
    found = [finding for rule in RULES if (finding := rule(experiment)) is not None]
    return tuple(_possible(experiment, finding) for finding in sorted(found, key=lambda f: _WEIGHTS.index(f.weight)))


def all_advice(found: Iterable[Finding]) -> tuple[Advice, ...]:
    """Every piece of advice once, in the order of the findings; not of notes."""
    return tuple(dict.fromkeys(each for finding in found if finding.weight != "note" for each in finding.advice))


def _possible(e: Experiment, finding: Finding) -> Finding:
    if e.engine.version is not None and e.engine.capabilities.get("reset_encoder_cache") is False:
        return replace(finding, advice=tuple(each for each in finding.advice if each is not known.RESET_ENCODER_CACHE))
    return finding


def _for_component(e: Experiment, name: str) -> tuple[Advice, ...]:
    return known.for_component(name, e.device.type) or ((known.RELEASE,) if name == "non_torch_bytes" else ())


def _meaning(e: Experiment, name: str) -> str:
    if name == "non_torch_bytes" and e.device.type == "cpu":
        return "On CPU that is the process's heap, its libraries and its stacks; release gives back what is free in it."
    return known.COMPONENT_MEANING[name]


def _points(e: Experiment, name: str) -> Sequence[RankPoint]:
    moment = e.moment(name)
    return moment.ranks if moment is not None else ()


def _total(e: Experiment, name: str, part: str) -> int | None:
    moment = e.moment(name)
    return moment.total(part) if moment is not None else None


def _notable(e: Experiment) -> int:
    return NOTABLE_BYTES * max(len(_points(e, BEFORE)), 1)


def _counts(part: int, of: int) -> bool:
    return part >= MINOR_SHARE * of


def _share(part: int, of: int, name: str) -> str:
    return f"{min(part / of, 1.0):.0%} {component_title(name)}"


def _ranks(e: Experiment) -> str:
    count = len(_points(e, AFTER))
    return "one rank" if count == 1 else f"{count} ranks"


def _largest_output(e: Experiment) -> int | None:
    sizes = [each.bytes for cache in e.caches for each in cache.largest if each.bytes]
    return max(sizes, default=None)


def _is_nothing(e: Experiment, step: RemedyStep) -> bool:
    return step.freed_bytes is not None and step.freed_bytes < _notable(e) / 2


def _freed(events: Sequence[Happened]) -> str:
    told = [event.freed_bytes for event in events if event.freed_bytes is not None]
    return size(sum(told)) if told else "an unknown amount"


def _times(count: int, one: str, many: str) -> str:
    return one if count == 1 else f"{count} {many}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
