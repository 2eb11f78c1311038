"""A wish ("8 x 32k + 4 images of 1080p each") turned into the smallest command line, or into the proof that it fails.

The grammar, in full::

    wish   = NUMBER "x" LENGTH [ "+" NUMBER ("image" | "images") ["of" SIZE] ["each"] ]
    LENGTH = tokens of one conversation, prompt and answer together: 32768, 32k, 1M (k is 1,024, M is 1,048,576)
    SIZE   = 720p, 1080p, 1440p, 4k, WIDTHxHEIGHT in pixels, or "N tokens"

The images come on top of the conversation's length; without a size they are as large as those that a running engine has
in its encoder cache. All conversations are in the KV cache at once, at full length.
The arithmetic is the planner's: what is planned is handed in as a function, for a running engine or for a config.json.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, TypeAlias

from highwater.explain.command_line import UNNAMED, Line
from highwater.model.units import gib_text
from kvplan import PlanError
from kvplan.pool import KvPool, largest

EXAMPLE = "8 x 32k + 4 images of 1080p each"
MAX_CONVERSATIONS = 100_000
MAX_LENGTH = 2**27
MAX_IMAGES = 10_000
MAX_TEXT = 200
HIGHEST_UTILIZATION = 0.95
"""Beyond it a start has too little left for what no profile sees."""
_RESOLUTIONS: Mapping[str, tuple[int, int]] = {
    "720p": (1280, 720),
    "1080p": (1920, 1080),
    "1440p": (2560, 1440),
    "4k": (3840, 2160),
}
_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}
_WISH = re.compile(
    r"(?P<conversations>\d+)\s*[x×]\s*(?P<length>\d+)\s*(?P<unit>[km]?)(?:\s+tokens)?"  # noqa: RUF001 - people paste it
    r"(?:\s*\+\s*(?P<images>\d+)\s+images?(?:\s+of\s+(?P<size>\d+p|4k|\d+\s*[x×]\s*\d+|\d+\s+tokens))?(?:\s+each)?)?",  # noqa: RUF001 - as above
    re.IGNORECASE,
)

Flags: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPool:
    """A KV cache of an answer, as far as a wish looks at one."""

    blocks: int
    bytes_per_block: int
    blocks_per_request: int
    fits: bool


Pool: TypeAlias = KvPool | AnsweredPool
Planner: TypeAlias = Callable[[Flags], Pool]
"""Sizes the KV cache with some flags other than they are, by the names of `EngineFlags`; raises PlanError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    embeddings: int  # in the encoder cache
    prompt_tokens: int  # in the KV cache: the embeddings, and the marks around and between them


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    count: int
    width: int | None = None  # in pixels; None: the tokens were given, or no size
    height: int | None = None
    tokens: int | None = None  # the tokens of one image; None: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    conversations: int
    tokens: int  # of each, without its images
    images: Images | None = None  # the images of each; None: no images


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    flags: Flags  # the flags that are changed
    conversations: int  # at once
    length: int  # of each, in tokens, images included
    needed_bytes: int  # their need of the KV cache of the rank that binds
    available_bytes: int  # the bytes of that
    fits: bool
    why: str  # the change, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    wish: Wish
    image: ImageTokens | None  # the cost of one image; None: no images
    length: int  # the length of one conversation with its images
    fits: bool  # whether it fits with lengths and numbers alone set
    chosen: Option | None  # the wish as it is, else the first change under which it fits; None: no change was found
    proof: str  # the arithmetic of the wish, in a sentence
    nearest: tuple[Option, ...]  # less of the wish, or other flags under which all of it fits
    reasons: Mapping[str, str]  # the reason of each flag of `chosen`, by its name
    refused: tuple[str, ...]  # changes that could not be planned, with the reason


def parse_wish(text: str) -> Wish:
    """Read a wish. Raises PlanError: it is not understood; the message names the place, and shows a wish."""
    if len(text) > MAX_TEXT:
        raise PlanError(f"wish: {len(text)} characters are too many; at most {MAX_TEXT}, as in '{EXAMPLE}'")
    stripped = " ".join(text.split())
    match = _WISH.match(stripped)
    if match is None:
        _not_understood(stripped, stripped, "a number of conversations, 'x', and their length")
    if match.end() != len(stripped):
        _not_understood(stripped, stripped[match.end() :].strip(), "nothing more, or '+ 4 images of 1080p'")
    conversations = _number("conversations", match["conversations"], 1, MAX_CONVERSATIONS)
    tokens = _number("length", match["length"], 1, MAX_LENGTH, unit=_UNITS[match["unit"].lower()])
    images = None
    if match["images"]:
        images = Images(count=_number("images", match["images"], 1, MAX_IMAGES))
        size = (match["size"] or "").lower().replace("×", "x")  # noqa: RUF001 - people paste it
        if size.endswith("tokens"):
            images = replace(images, tokens=_number("tokens of an image", size.split()[0], 1, MAX_LENGTH))
        elif "x" in size:
            width, height = (_number("pixels", side, 1, 100_000) for side in size.split("x"))
            images = replace(images, width=width, height=height)
        elif size in _RESOLUTIONS:
            width, height = _RESOLUTIONS[size]
            images = replace(images, width=width, height=height)
        elif size:
            known = f"{', '.join(_RESOLUTIONS)}, WIDTHxHEIGHT, N tokens"
            raise PlanError(f"wish: {match['size']!r} is not a known size of an image; known: {known}")
    return Wish(conversations=conversations, tokens=tokens, images=images)


def grant(
    wish: Wish,
    plan: Planner,
    steps: Iterable[tuple[Flags, str]],
    *,
    image: ImageTokens | None,
    images_per_prompt: int | None = None,
) -> Granted:
    """Find the smallest command line that a wish fits in, or what comes nearest.

    ``plan`` sizes the KV cache with other flags than the present ones, and ``steps`` are those that make room, as
    `changes` has them. ``image`` is the cost of one image, needed where the wish has images; ``images_per_prompt`` is
    the present limit, where it is known. Raises PlanError: the wish cannot be planned at all: vLLM would refuse the
    layers, or a number makes no sense.
    """
    images = wish.images.count if wish.images is not None else 0
    if images and image is None:
        raise PlanError("wish: the tokens of an image are not known; give them, as in '4 images of 2040 tokens'")
    length = wish.tokens + images * (image.prompt_tokens if image is not None else 0)
    extra = {"limit_mm_per_prompt": {"image": images}} if images and images != images_per_prompt else {}
    search = _Search(plan, wish.conversations, length, extra)
    first = search.option({}, "only lengths and numbers are set")
    granting, nearest, refused = [first] if first.fits else [], [], []
    if not first.fits:  # where it fits as it is, nobody asks for more
        for flags, why in steps:
            try:
                granting.append(search.option(flags, why))
            except PlanError as exc:
                refused.append(str(exc))
        granting = [option for option in granting if option.fits]
        # A conversation that is no longer than its images has no room for them.
        shorter = [option for option in search.less() if option.length > length - wish.tokens]
        nearest = [*shorter, *granting[1:]]
    chosen = next(iter(granting), None)
    return Granted(
        wish=wish,
        image=image,
        length=length,
        fits=first.fits,
        chosen=chosen,
        proof=search.proof(first),
        nearest=tuple(nearest),
        reasons={} if chosen is None else _reasons(chosen, wish, image, length),
        refused=tuple(refused),
    )


def wish_json(granted: Granted, line: Line = UNNAMED) -> dict[str, Any]:
    """Return the answer to a wish about a command line for programs."""
    nearest = [{**asdict(option), "command_line": str(line.changed(option.flags))} for option in granted.nearest]
    return {**asdict(granted), "nearest": nearest}


@dataclass(frozen=True, slots=True)
class _Search:
    """Plans the same conversations under one set of flags after another."""

    plan: Planner
    conversations: int
    length: int
    extra: Flags  # flags of an answer that are not planned with

    def pool(self, more: Flags, conversations: int, length: int) -> Pool:
        return self.plan({"max_model_len": length, "max_num_seqs": conversations, **more})

    def option(self, more: Flags, why: str, *, conversations: int | None = None, length: int | None = None) -> Option:
        count, tokens = conversations or self.conversations, length or self.length
        pool = self.pool(more, count, tokens)
        return Option(
            flags={"max_model_len": tokens, "max_num_seqs": count, **more, **self.extra},
            conversations=count,
            length=tokens,
            needed_bytes=needed_bytes(pool, count),
            available_bytes=pool.blocks * pool.bytes_per_block,
            fits=pool.fits and fitting_conversations(pool) >= count,
            why=why,
        )

    def less(self) -> Iterator[Option]:
        """Yield the nearest that fits without other flags: fewer conversations, and shorter ones."""

        def shorter(length: int) -> Option:
            return self.option({}, f"shorter conversations: {self.conversations} of {length} tokens fit", length=length)

        fitting = fitting_conversations(self.pool({}, self.conversations, self.length))
        if count := min(fitting, self.conversations - 1):
            fewer = self.option({}, f"fewer conversations: {count} of this length fit", conversations=count)
            if fewer.fits:
                yield fewer
        if most := largest(self.length - 1, lambda length: shorter(length).fits):
            yield shorter(most)

    def proof(self, option: Option) -> str:
        pool, count = self.pool({}, self.conversations, self.length), self.conversations
        each = pool.blocks_per_request
        return (
            f"{count} conversations of {self.length:,} tokens take {count} x {each:,} blocks and the null block, "
            f"{count * each + 1:,} in all, of {pool.bytes_per_block:,} bytes on a rank: "
            f"{option.needed_bytes:,} bytes ({gib_text(option.needed_bytes)}). There are {pool.blocks:,} blocks, "
            f"{option.available_bytes:,} bytes ({gib_text(option.available_bytes)})."
        )


def fitting_conversations(pool: Pool) -> int:
    """Return how many requests of the maximum length are in the KV cache at once; vLLM keeps the null block itself."""
    return max(0, pool.blocks - 1) // max(1, pool.blocks_per_request)


def needed_bytes(pool: Pool, conversations: int) -> int:
    """Return the bytes of a pool that just holds so many requests of the maximum length."""
    return (conversations * pool.blocks_per_request + 1) * pool.bytes_per_block


def changes(
    utilization: float | None, kv_cache_dtype: str | None, tensor_parallel_size: int
) -> list[tuple[Flags, str]]:
    """Return other flags that make room, the smallest change first, each with its reason.

    The present ones are given; ``utilization`` is None where it does not size the KV cache.
    """
    can_raise = utilization is not None and utilization < HIGHEST_UTILIZATION
    raised = {"gpu_memory_utilization": HIGHEST_UTILIZATION} if can_raise else {}
    halved = {} if (kv_cache_dtype or "auto").startswith("fp8") else {"kv_cache_dtype": "fp8"}
    both = {**raised, **halved} if raised and halved else {}
    steps: list[tuple[Flags, str]] = [
        (raised, f"more of the device: {HIGHEST_UTILIZATION} of it"),
        (halved, "keys and values of 8 bits"),
        (both, "more of the device, and keys and values of 8 bits"),
    ]
    steps += [
        ({"tensor_parallel_size": ranks}, f"{ranks} devices in place of {tensor_parallel_size}")
        for ranks in (tensor_parallel_size * times for times in (2, 4, 8))
    ]
    return [(flags, why) for flags, why in steps if flags]


def _reasons(chosen: Option, wish: Wish, image: ImageTokens | None, length: int) -> dict[str, str]:
    of_images = ""
    if wish.images is not None and image is not None:
        of_images = f", {wish.tokens} and {wish.images.count} images of {image.prompt_tokens}"
    reasons = {
        "max_model_len": f"a conversation is {length} tokens long{of_images}",
        "max_num_seqs": f"{wish.conversations} conversations run at once; more would wait for room in the KV cache",
        "gpu_memory_utilization": f"{chosen.why}; the KV cache gets what is added",
        "kv_cache_dtype": f"{chosen.why}: a token takes half the bytes; answers may differ slightly",
        "tensor_parallel_size": f"{chosen.why}: each keeps a part of the weights and of the KV heads",
        "limit_mm_per_prompt": "a prompt may have as many images as were wished for",
    }
    return {name: reasons[name] for name in chosen.flags}


def _number(name: str, digits: str, least: int, most: int, *, unit: int = 1) -> int:
    # Python reads digits of any length, in square time.
    value = int(digits) * unit if len(digits) <= math.log10(MAX_LENGTH) + 1 else MAX_LENGTH + 1
    if not least <= value <= most:
        raise PlanError(f"wish: {name} {digits}: must be {least} to {most}")
    return value


def _not_understood(text: str, rest: str, expected: str) -> NoReturn:
    raise PlanError(f"wish: {text!r} is not understood from {rest!r} on, where {expected} would be; as in '{EXAMPLE}'")
