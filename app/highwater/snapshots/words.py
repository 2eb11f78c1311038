"""An explanation and a difference as text for a terminal. Pure.

All text of a snapshot is foreign; the command that prints it makes it printable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from highwater.text.table import rank_title, table
from highwater.units import size_text, span_text

_SHOWN_PINS: Final = 8
_SHOWN_STACKS: Final = 10
_FILE_NAME: Final = re.compile(
    r"highwater-snapshot-(?P<taken>[0-9A-Za-z_]+)-(?P<dp_rank>[0-9]+|x)-(?P<rank>[0-9]+|x)-(?P<pid>[0-9]+)\.pickle"
)
TURN_ON: Final = (
    "PyTorch's allocation history was off when it was taken. `highwater snapshot take --record-stacks 10` turns it on "
    "for ten minutes; what is allocated from then on has a stack."
)


def stacks_text(answer: dict[str, Any]) -> str:
    """Return the response to ``POST /memory/snapshot/stacks``: a line a rank."""
    return "\n".join(
        f"rank {rank_title(rank.get('dp_rank'), rank['rank'])}: allocation stacks are {_recorded(rank)}"
        for rank in answer["ranks"]
    )


def _recorded(rank: Mapping[str, Any]) -> str:
    if rank["recording"]:
        return f"recorded for {span_text(rank['seconds_left'])}"
    return "not recorded any more" if rank["was_recording"] else "not recorded now"


def explanation_text(figures: dict[str, Any], name: str) -> str:
    """Return a file's explanation, as the reading process returned it, in sentences."""
    match = _FILE_NAME.fullmatch(name)
    lines = [name]
    if match is not None:
        lines = [f"{name}: data-parallel rank {match['dp_rank']}, rank {match['rank']}, process {match['pid']}"]
    for device in figures["devices"]:
        lines += ["", *_device(device, has_stacks=figures["has_stacks"])]
    if not figures["devices"]:
        lines += ["", "The allocator has no memory from the driver."]
    lines += ["", *_footer(figures)]
    return "\n".join(lines)


def _device(device: dict[str, Any], *, has_stacks: bool) -> Iterator[str]:
    size = {key: size_text(value) for key, value in device.items() if key.endswith("_bytes")}
    pending = f", {size['pending_bytes']} waits for another stream" if device["pending_bytes"] else ""
    yield (
        f"Device {device['device']}: {size['reserved_bytes']} reserved in {_count(device['segments'], 'segment')}, "
        f"{size['allocated_bytes']} allocated{pending}, {size['free_bytes']} free."
    )
    if device["free_bytes"]:
        parts = [
            f"{size[key]} in {_count(count, 'segment')} that {holding}"
            for count, key, holding in (
                (device["holed_segments"], "held_free_bytes", "also hold tensors"),
                (device["whole_segments"], "whole_free_bytes", "hold nothing"),
            )
            if count
        ]
        yield f"Free: {' and '.join(parts)}. The largest free block has {size['largest_free_bytes']}."
        yield from _wanted(device)
    yield from _gains(device)
    yield ""
    yield _pools(device)
    if device["pins"]:
        yield ""
        yield from _pinned(device, has_stacks=has_stacks)


def _wanted(device: dict[str, Any]) -> Iterator[str]:
    wanted = device["wanted"]
    if wanted is None:
        yield "How large a request must be served is not known: the snapshot has no history. Ask with --want 180MiB."
        return
    size = size_text(wanted["bytes"])
    origin = {
        "asked": f"{size} is wanted",
        "history": f"The largest request in the history has {size}",
        "failed": f"The last request that failed has {size}",
    }[wanted["from"]]
    where = f"the {wanted['kind']} blocks of stream {wanted['stream']:x}"
    largest = wanted["largest_free_bytes"]
    if wanted["fits"]:
        yield f"{origin}: a free block serves it, {size_text(largest)} among {where}."
        return
    hole = f"the largest hole among {where} is {size_text(largest)} < {size}" if largest else f"{where} have no hole"
    yield (
        f"{origin}: {size_text(device['free_bytes'])} is free in "
        f"{_count(device['holed_segments'] + device['whole_segments'], 'segment')}, and {hole} wanted."
    )
    free = wanted["device_free_bytes"]
    then = "" if free is None else f" The driver had {size_text(free)} free when it failed."
    yield f"PyTorch asks the driver for {size_text(wanted['new_segment_bytes'])} more.{then}"


def _gains(device: dict[str, Any]) -> Iterator[str]:
    whole = _count(device["release_segments"], "whole segment")
    yield f"release would give back {size_text(device['release_bytes'])} ({whole})."
    if device["kept_whole_bytes"]:
        yield (
            f"{size_text(device['kept_whole_bytes'])} more is free in private pools, which keep it while their graphs, "
            "or the sleep mode, last."
        )
    expandable = device["expandable"]
    if expandable["at_most_bytes"]:
        pages, most = size_text(expandable["pages_bytes"]), size_text(expandable["at_most_bytes"])
        yield (
            f"With expandable segments, release could give back {pages} more as the blocks lie now (whole free pages), "
            f"and {most} at most: blocks in use are never moved."
        )
    elif expandable["segments"]:
        yield f"Expandable segments are on: {size_text(expandable['bytes'])} is mapped by them."


def _pools(device: dict[str, Any]) -> str:
    rows = [
        [
            _pool_title(pool),
            str(pool["segments"]),
            *(size_text(pool[f"{key}_bytes"]) for key in ("reserved", "allocated", "free", "largest_free")),
            str(pool["holed_segments"]),
        ]
        for pool in device["pools"]
    ]
    if device["pools_left_out"]:
        rows.append([f"{device['pools_left_out']} more pools", *("" for _ in range(6))])
    return table(["pool", "segments", "reserved", "allocated", "free", "largest free", "with holes"], rows)


def _pool_title(pool: dict[str, Any]) -> str:
    whose = "" if pool["pool"] == [0, 0] else f"private {pool['pool'][0]}.{pool['pool'][1]}, "
    stream = f", stream {pool['stream']:x}" if pool["stream"] else ""
    return f"{whose}{pool['kind']}{stream}"


def _pinned(device: dict[str, Any], *, has_stacks: bool) -> Iterator[str]:
    if has_stacks and device["pinned_by"]:
        yield "What pins free memory (a segment that several stacks pin counts for each):"
        for one in device["pinned_by"][:_SHOWN_STACKS]:
            held = size_text(one["held_bytes"])
            where = f"{_count(one['segments'], 'segment')} with {size_text(one['free_bytes'])} free"
            yield f"  {where}, held by {held} from {_stack(one['stack'])}"
    yield "Segments with most free memory that cannot go back:"
    for pin in device["pins"][:_SHOWN_PINS]:
        blocks = _count(pin["held_blocks"], "block")
        behind = f" from {_stack(pin['stack'])}" if pin["stack"] else ""
        largest = "" if pin["held_blocks"] == 1 else f", the largest {size_text(pin['largest_held_bytes'])}"
        yield (
            f"  {pin['address']:#x} {_pool_title(pin)}: {size_text(pin['free_bytes'])} of {size_text(pin['bytes'])} "
            f"free (largest {size_text(pin['largest_free_bytes'])}), pinned by {blocks} of "
            f"{size_text(pin['held_bytes'])}{largest}{behind}"
        )
    rest = len(device["pins"]) - _SHOWN_PINS + device["pins_left_out"]
    if rest > 0:
        yield f"  and {rest:,} more"


def _stack(frames: Sequence[str]) -> str:
    return " ← ".join(frames[:3]) if frames else "an unknown place"


def _footer(figures: dict[str, Any]) -> Iterator[str]:
    if not figures["has_stacks"]:
        yield TURN_ON
    else:
        yield f"Stacks are recorded; the history has {figures['trace_entries']:,} entries."
    limit = figures["settings"].get("max_split_size")
    if isinstance(limit, int) and 0 < limit < 1 << 60:
        yield f"max_split_size is {size_text(limit)}: smaller requests never use free blocks above it."


def difference_text(figures: dict[str, Any], before: str, after: str) -> str:
    """Return the difference of two files, as the reading process returned it, in sentences."""
    lines = [f"{before} → {after}", *(f"warning: {one}" for one in warnings_of(figures, before, after))]
    for device in figures["devices"]:
        lines += ["", *_changed(device, all(figures["has_stacks"]))]
    if not figures["devices"]:
        lines += ["", "Neither has memory from the driver."]
    if not all(figures["has_stacks"]):
        lines += ["", TURN_ON, "Take both at moments without a running request, after that."]
    return "\n".join(lines)


def warnings_of(figures: dict[str, Any], before: str, after: str) -> Iterator[str]:
    """Yield the reasons why the two may not be comparable, by their names and devices."""
    first, second = _FILE_NAME.fullmatch(before), _FILE_NAME.fullmatch(after)
    if first is not None and second is not None:
        for key, what in (("dp_rank", "data-parallel ranks"), ("rank", "ranks"), ("pid", "processes")):
            if first[key] != second[key]:
                yield f"they are of different {what}, {first[key]} and {second[key]}: what differs need not have grown"
        if first["taken"] > second["taken"]:
            yield "the first is the younger one: growth is shown as shrinking"
    for device in figures["devices"]:
        if device["in"] != [True, True]:
            yield f"device {device['device']} is in the {'first' if device['in'][0] else 'second'} alone"
    if any(figures["has_stacks"]) and not all(figures["has_stacks"]):
        yield "only one of them has stacks: they are compared by the size of blocks"


def _changed(device: dict[str, Any], has_stacks: bool) -> Iterator[str]:
    old, new = device["before"], device["after"]
    for key in ("reserved", "allocated", "free", "largest_free"):
        change = new[f"{key}_bytes"] - old[f"{key}_bytes"]
        figures = f"{size_text(old[f'{key}_bytes'])} → {size_text(new[f'{key}_bytes'])}"
        title = key.replace("_", " ")
        lead = f"Device {device['device']}: " if key == "reserved" else "  "
        yield f"{lead}{title} {figures} ({size_text(change, signed=True)})"
    rows = device["by_stack"] if has_stacks else device["by_size"]
    if not rows:
        yield "Nothing that is held has changed."
        return
    yield "By the stack that allocated it:" if has_stacks else "By the size of the blocks:"
    for row in rows:
        what = _stack(row["stack"]) if has_stacks else f"blocks of {size_text(row['block_bytes'])}"
        yield f"  {size_text(row['bytes'], signed=True)} in {row['blocks']:+,} blocks: {what}"
    rest = device["by_stack_left_out" if has_stacks else "by_size_left_out"]
    if rest["count"]:
        yield f"  and {rest['count']:,} more, {size_text(rest['bytes'], signed=True)} together"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
