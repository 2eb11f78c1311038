"""The situations. Sizes are `mem_get_info`'s bytes, never npu-smi's MiB; the Ascend figures are a real machine's."""

from __future__ import annotations

from dataclasses import replace

from tests.situations.device import GIB, MIB, Plan
from tests.situations.events import (
    claims,
    clients,
    end_engine,
    long_step,
    neighbours,
    no_snapshot,
    no_traffic,
    quirk,
    set_clock,
    silence,
    sleep,
    traffic,
    wake_up,
)
from tests.situations.situation import Script, Situation
from tests.situations.worker import EngineOptions

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
ASCEND = 65_452_113_920
H100 = int(79.19 * GIB)
L4 = int(22.0 * GIB)
EIGHT = int(7.63 * GIB)
MIG = int(9.75 * GIB)
BEGIN = 30.0
"""The time at which traffic begins: the engine has been ready for ten seconds."""


def _gib(size: float) -> int:
    return int(size * GIB)


# --- engines ---

STORY_32B = Plan(
    weights=31_459_200_000,
    kv_cache=21_540_531_712,
    context=3_785 * MIB,
    graphs_free=256 * MIB,
    peak=2_458 * MIB,
    text_peak=400 * MIB,
    workspace=669 * MIB,
    outside=180 * MIB,
    image=41 * MIB,
    image_embeds=1024,
    encoder_budget_embeds=16_384,
)
"""54,650 MiB at rest; a benchmark of images takes it to 58,432."""
STORY_8B = Plan(
    weights=9_194_800_000,
    kv_cache=_gib(44.30),
    context=1_868 * MIB,
    graphs_free=256 * MIB,
    peak=_gib(1.884),
    text_peak=400 * MIB,
    workspace=300 * MIB,
    outside=180 * MIB,
    image=384 * MIB,
    image_embeds=12_288,
    encoder_budget_embeds=32_768,
)
"""0.9022 of the device at rest; two images of 4096 x 4096 fit the encoder cache."""


def _sized(total: int, utilization: float, *, weights: int, peak: int, over: int, images: bool) -> Plan:
    """An engine that profiled its peak, so that weights, pool and peak make up what was requested.

    ``over`` is what comes on top after the profile: graphs, libraries.
    """
    context = min(_gib(0.5), total // 32)
    pool = int(total * utilization) - weights - peak - context - 64 * MIB
    plan = Plan(
        weights=weights, kv_cache=pool, context=context + over, peak=peak, text_peak=peak, graphs_free=over // 4
    )
    plan = replace(plan, context=plan.context - plan.graphs_free)
    if not images:
        return plan
    return replace(plan, text_peak=peak // 4, image=22 * MIB, image_embeds=256, encoder_budget_embeds=8192)


def _h100(utilization: float, *, images: bool = True) -> Plan:
    peak = _gib(3.0 if images else 1.5)
    return _sized(H100, utilization, weights=_gib(16), peak=peak, over=_gib(0.6), images=images)


def _npu(ranks: int = 2, utilization: float = 0.95, **other: object) -> EngineOptions:
    return EngineOptions(kind="npu", ranks=ranks, utilization=utilization, **other)  # type: ignore[arg-type]


def _gpu(utilization: float, ranks: int = 1, **other: object) -> EngineOptions:
    return EngineOptions(kind="cuda", ranks=ranks, utilization=utilization, **other)  # type: ignore[arg-type]


def _ascend(name: str, title: str, script: Script, seconds: float, **other: object) -> Situation:
    """The story's second setting: 8B at 0.95."""
    row: dict[str, object] = {
        "cards": (ASCEND, ASCEND),
        "plan": STORY_8B,
        "options": _npu(),
        "version": "0.12.0",
        **other,
    }
    return Situation(name=name, title=title, script=script, seconds=seconds, **row)  # type: ignore[arg-type]


def _on_h100(name: str, title: str, utilization: float, script: Script, seconds: float, **other: object) -> Situation:
    row: dict[str, object] = {
        "cards": (H100,),
        "plan": _h100(utilization),
        "options": _gpu(utilization),
        "version": "0.32.0",
        **other,
    }
    return Situation(name=name, title=title, script=script, seconds=seconds, **row)  # type: ignore[arg-type]


# --- traffic ---

_IMAGES = traffic(images=2.0)
_TEXT = traffic(texts=True)
_FRAGMENTS_SLOW = traffic(images=0.5, stray=160 * MIB)
_FRAGMENTS_FAST = traffic(images=1.0, stray=160 * MIB)


def _then_idle(event: object, busy: float, idle: float) -> tuple[Script, float]:
    script: Script = ((BEGIN, event), (BEGIN + busy, no_traffic))  # type: ignore[assignment]
    return script, BEGIN + busy + idle


def _steady(event: object, busy: float = 5 * MINUTE, idle: float = 2 * MINUTE) -> dict[str, object]:
    script, seconds = _then_idle(event, busy, idle)
    return {"script": script, "seconds": seconds, "fits": True}


def _h100_rows() -> tuple[Situation, ...]:
    return tuple(
        _on_h100(
            f"h100-{utilization * 100:.0f}-{kind}",
            f"H100 at {utilization:.2f}, {'images' if kind == 'images' else 'text only'}",
            utilization,
            plan=_h100(utilization, images=kind == "images"),
            **_steady(_IMAGES if kind == "images" else _TEXT),  # type: ignore[arg-type]
        )
        for utilization in (0.90, 0.92, 0.95)
        for kind in ("images", "text")
    )


def _small(name: str, title: str, total: int, utilization: float, *, weights: float, peak: float) -> Situation:
    plan = _sized(total, utilization, weights=_gib(weights), peak=_gib(peak), over=_gib(0.1), images=False)
    return Situation(
        name=name,
        title=title,
        cards=(total,),
        plan=plan,
        options=_gpu(utilization),
        version="0.32.0",
        **_steady(_TEXT),  # type: ignore[arg-type]
    )


def _ramp(begin: float, end: float, sizes: tuple[float, float], steps: int = 40) -> Script:
    first, last = sizes
    return tuple(
        (begin + (end - begin) * step / steps, neighbours(_gib(first + (last - first) * step / steps)))
        for step in range(1, steps + 1)
    )


def _at_the_door(name: str, title: str, script: Script, **other: object) -> Situation:
    """An engine that takes a quarter of a MiB for a moment for each embedding that it makes."""
    plan = replace(STORY_8B, token_peak=256 * 1024, peak=400 * MIB)
    script = ((BEGIN - 5, _TEXT), *script)
    return _ascend(name, title, script, 3 * MINUTE, plan=plan, options=_npu(skip_mm_profiling=True), **other)


_UNPROFILED = replace(_h100(0.95), image=160 * MIB, image_embeds=256, encoder_budget_embeds=256 * 40)
"""An encoder cache of 6.25 GiB that the profile left out."""

SITUATIONS: tuple[Situation, ...] = (
    Situation(
        name="story-32b-90",
        title="Ascend, 32B at 0.90: ten minutes of images, then idle",
        cards=(ASCEND, ASCEND),
        plan=STORY_32B,
        options=_npu(utilization=0.90),
        version="0.12.0",
        **_steady(_IMAGES, 10 * MINUTE, 5 * MINUTE),  # type: ignore[arg-type]
    ),
    _ascend("story-8b-95", "Ascend, 8B at 0.95: images, then idle", **_steady(traffic(images=0.5))),  # type: ignore[arg-type]
    _ascend(
        "fragments-slow",
        "Ascend, 8B at 0.95: 160 MiB of fragments an image, 0.5 images a second",
        ((BEGIN, _FRAGMENTS_SLOW),),
        15 * MINUTE,
        needs=5,
    ),
    _ascend(
        "fragments-fast",
        "the same, one image a second",
        ((BEGIN, _FRAGMENTS_FAST),),
        10 * MINUTE,
        needs=10,
    ),
    _ascend(
        "fragments-held",
        "fragments that `empty_cache` cannot give back",
        ((BEGIN, traffic(images=0.5, split=10 * MIB)),),
        12 * MINUTE,
        may_die=True,
    ),
    *_h100_rows(),
    _small("l4-90", "L4 at 0.90, text", L4, 0.90, weights=14.0, peak=1.2),
    _small("l4-98", "L4 at 0.98, text", L4, 0.98, weights=14.0, peak=1.2),
    _small("8gib-92", "a card of 8 GiB at 0.92, text", EIGHT, 0.92, weights=3.5, peak=0.5),
    _small("mig-92", "a MIG slice of 10 GB at 0.92, text", MIG, 0.92, weights=4.0, peak=0.6),
    _on_h100(
        "kv-cache-bytes",
        "H100 with --kv-cache-memory-bytes, images",
        0.92,
        options=_gpu(0.92, kv_cache_memory_bytes=_gib(52)),
        plan=replace(_h100(0.92), kv_cache=_gib(52)),
        **_steady(_IMAGES),  # type: ignore[arg-type]
    ),
    _on_h100(
        "sleeping",
        "an engine asleep for ten minutes, its memory taken by another process meanwhile",
        0.90,
        (
            (BEGIN, _IMAGES),
            (BEGIN + 120, no_traffic),
            (BEGIN + 130, sleep),
            (BEGIN + 150, neighbours(_gib(76))),
            (BEGIN + 720, neighbours(0)),
            (BEGIN + 730, wake_up()),
            (BEGIN + 740, _IMAGES),
        ),
        16 * MINUTE,
        most_remedies=0,
    ),
    _on_h100(
        "half-woken",
        "an engine whose weights alone were woken, beside a process that fills the card",
        0.90,
        (
            (BEGIN, _IMAGES),
            (BEGIN + 120, no_traffic),
            (BEGIN + 130, sleep),
            (BEGIN + 140, neighbours(_gib(40))),
            (BEGIN + 200, wake_up("weights")),
            (BEGIN + 240, neighbours(_gib(70))),
            (BEGIN + 500, neighbours(0)),
            (BEGIN + 510, wake_up()),
            (BEGIN + 520, _IMAGES),
        ),
        15 * MINUTE,
        most_remedies=0,
    ),
    _on_h100(
        "neighbour-grows",
        "a shared card: the neighbour grows until it is full",
        0.50,
        ((BEGIN, _IMAGES), *_ramp(BEGIN + 120, BEGIN + 600, (0.0, 38.0))),
        15 * MINUTE,
        may_die=True,
    ),
    _on_h100(
        "neighbour-visits",
        "a neighbour that comes for a minute, and goes",
        0.50,
        ((BEGIN, _IMAGES), (BEGIN + 120, neighbours(_gib(36.5))), (BEGIN + 180, neighbours(0))),
        10 * MINUTE,
    ),
    _ascend(
        "second-wave",
        "a second wave right after relief, 0.4 GiB a second",
        (
            (BEGIN, _FRAGMENTS_FAST),
            (BEGIN + 30, traffic(images=2.5, stray=160 * MIB)),
            (BEGIN + 120, traffic(images=0.5)),
        ),
        5 * MINUTE,
        needs=5,
    ),
    _ascend(
        "restart-after-hopeless-life",
        "a life that ended under live tensors; the next one's memory can be given back",
        (
            (BEGIN, traffic(images=1.0, leak=200 * MIB)),
            (BEGIN + 60, traffic(images=1.0, stray=160 * MIB)),
        ),
        10 * MINUTE,
        may_die=True,
        needs=5,
    ),
    _ascend(
        "rest-between-waters",
        "one crossing, then half an hour of rest at 0.9022 of the device",
        ((BEGIN, _FRAGMENTS_FAST), (BEGIN + 40, no_traffic)),
        HOUR / 2,
        most_remedies=3,
    ),
    _ascend(
        "one-rank-far",
        "fragments on one rank of two",
        ((BEGIN, traffic(images=1.0, stray=160 * MIB, ranks=(1,))),),
        8 * MINUTE,
        needs=5,
    ),
    _ascend(
        "silent-rank",
        "the rank that fills is not heard of for three minutes",
        (
            (BEGIN, traffic(images=0.5, stray=8 * MIB, ranks=(1,))),
            (BEGIN + 400, silence(1, is_silent=True)),
            (BEGIN + 580, silence(1, is_silent=False)),
        ),
        13 * MINUTE,
        needs=1,
    ),
    _ascend(
        "clock-back",
        "the wall clock is set back by an hour while fragments grow",
        ((BEGIN, _FRAGMENTS_FAST), (BEGIN + 120, set_clock(-HOUR))),
        10 * MINUTE,
        needs=5,
    ),
    _ascend(
        "clock-forward",
        "the wall clock is set forward by two hours while fragments grow",
        ((BEGIN, _FRAGMENTS_FAST), (BEGIN + 120, set_clock(2 * HOUR))),
        10 * MINUTE,
        needs=5,
    ),
    _ascend(
        "restarts-every-minute",
        "an engine that restarts every minute, fragments in each life",
        ((BEGIN, traffic(images=2.0, stray=160 * MIB)), *((60.0 * minute, end_engine) for minute in range(1, 10))),
        10 * MINUTE,
        needs=10,
    ),
    _on_h100(
        "a-day-of-traffic",
        "H100 at 0.92: images for a day without a pause",
        0.92,
        ((BEGIN, traffic(images=1.0)),),
        DAY,
        settings={"poll_seconds": 10.0, "idle_poll_seconds": 10.0},
        tick_seconds=1.0,
        fits=True,
    ),
    # --- beyond the list ---
    _ascend(
        "requested-unknown",
        "vllm-ascend that does not tell what it requested, fragments",
        ((BEGIN, _FRAGMENTS_FAST),),
        10 * MINUTE,
        options=_npu(tells_requested=False),
        needs=5,
    ),
    _ascend(
        "releasable-unknown",
        "a torch that cannot tell what it could give back: idle first, then fragments",
        (
            (5.0, no_snapshot),
            (BEGIN, traffic(images=0.5)),
            (BEGIN + 120, no_traffic),
            (BEGIN + 240, _FRAGMENTS_FAST),
        ),
        15 * MINUTE,
        needs=2,
    ),
    _ascend(
        "lying-worker",
        "a worker that claims 3 GiB which no release gives back",
        (
            (0.0, quirk(tamper=claims("memory", "releasable_bytes", 3 * GIB))),
            (BEGIN, traffic(images=0.5, split=8 * MIB)),
        ),
        12 * MINUTE,
        may_die=True,
        restarts=False,
    ),
    _on_h100(
        "encoder-cache-unprofiled",
        "an encoder cache of 6.25 GiB that the profile left out",
        0.95,
        ((BEGIN, traffic(images=0.5)),),
        6 * MINUTE,
        plan=_UNPROFILED,
        cache_counts=True,
        needs=1,
    ),
    _on_h100(
        "trim-refused",
        "the same with an encoder cache connector: trim and reset are refused",
        0.95,
        ((BEGIN, traffic(images=0.5)),),
        6 * MINUTE,
        plan=_UNPROFILED,
        options=_gpu(0.95, ec_connector=True),
        may_die=True,
    ),
    _on_h100(
        "two-cards",
        "two ranks on cards of different size, text",
        0.92,
        cards=(_gib(47.4), _gib(39.4)),
        plan=_sized(_gib(39.4), 0.92, weights=_gib(16), peak=_gib(1.5), over=_gib(0.6), images=False),
        options=_gpu(0.92, ranks=2),
        **_steady(_TEXT),  # type: ignore[arg-type]
    ),
    _ascend(
        "idle-then-burst",
        "an idle hour, then a burst of fragments",
        (
            (BEGIN, traffic(images=0.5)),
            (BEGIN + 120, no_traffic),
            (BEGIN + HOUR, traffic(images=2.0, stray=160 * MIB)),
        ),
        HOUR + 3 * MINUTE,
        needs=5,
    ),
    _ascend(
        "clock-back-while-idle",
        "the wall clock is set back by an hour as an idle period begins",
        (
            (BEGIN, traffic(images=0.5)),
            (BEGIN + 120, no_traffic),
            (BEGIN + 125, set_clock(-HOUR)),
        ),
        10 * MINUTE,
        needs=1,
        most_remedies=1,
    ),
    _on_h100(
        "unreachable-rule",
        "an operator's rule whose waters lie under the engine's rest",
        0.92,
        settings={
            "policy": {
                "rules": [
                    {
                        "name": "mine",
                        "signal": "device_used_ratio",
                        "high_water": 0.5,
                        "low_water": 0.4,
                        "remedies": ["release"],
                    }
                ]
            }
        },
        **_steady(_IMAGES),  # type: ignore[arg-type]
    ),
    _ascend(
        "slow-release",
        "a release that takes twelve seconds",
        ((0.0, quirk(release_seconds=12.0)), (BEGIN, _FRAGMENTS_FAST)),
        10 * MINUTE,
        needs=5,
    ),
    _ascend(
        "long-steps",
        "steps of forty seconds, in which no worker answers, between fragments",
        ((BEGIN, _FRAGMENTS_SLOW), *((BEGIN + 90.0 * number, long_step(40.0)) for number in range(1, 9))),
        15 * MINUTE,
        needs=3,
    ),
    _on_h100(
        "flapping",
        "a minute of images, 45 seconds of rest, again and again",
        0.92,
        tuple(
            (BEGIN + 105.0 * number + (60.0 if part else 0.0), no_traffic if part else _IMAGES)
            for number in range(6)
            for part in (0, 1)
        ),
        12 * MINUTE,
        fits=True,
    ),
    _on_h100(
        "no-engine-stats",
        "--disable-log-stats: whether requests run is not reported",
        0.92,
        settings={},
        script=((0.0, quirk(mute=True)), (BEGIN, _IMAGES)),
        seconds=10 * MINUTE,
        fits=True,
    ),
    # --- images through the sidecar, on an engine that does not profile its encoder ---
    _at_the_door(
        "door-off-flood",
        "40 clients at once with images of 2048 x 2048 pixels, and no door",
        ((BEGIN, clients(2048, number=40, every=30.0)),),
        settings={"door": {"mode": "off"}},
        may_die=True,
        restarts=False,
        served=(2048,),
    ),
    _at_the_door(
        "door-flood",
        "the same with the door",
        ((BEGIN, clients(2048, number=40)),),
        served=(2048,),
    ),
    _at_the_door(
        "door-huge-image",
        "one image of 5,040 x 5,040 pixels among thumbnails",
        ((BEGIN, clients(280, 560, number=10)), (BEGIN + 60, clients(5040, number=1, every=20.0))),
        served=(280, 560),
        refused=(5040,),
    ),
    _at_the_door(
        "door-urgent",
        "a neighbour fills the card while images and texts come",
        (
            (BEGIN, clients(1120, number=10)),
            (BEGIN + 60, neighbours(_gib(60))),
            (BEGIN + 150, neighbours(0)),
        ),
        served=(1120,),
        may_die=True,
    ),
)
