"""A finding: a conclusion from the numbers, the same wherever it is shown; and advice: what to change, and its cost.

The sentences and figures of every finding stand in findings.toml, under its name; a rule hands over what it found.
Advice stands in advice.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Any, Final, Literal, TypeAlias

from highwater.model.components import COMPONENTS
from highwater.model.rank import RankReading, device_traits
from highwater.model.units import size_text, span_text

# likely: explains an incident by itself, or calls for a change. clue: had a part in it, or may matter. note: good to
# know.
Weight: TypeAlias = Literal["likely", "clue", "note"]
Where: TypeAlias = Literal["incident", "load", "running", "start", "host", "set-up"]
Figure: TypeAlias = int | float | str | None

WEIGHTS: Final[tuple[Weight, ...]] = ("likely", "clue", "note")
_WORDING: Final[Mapping[str, Any]] = tomllib.loads(Path(__file__).with_name("findings.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A setting to change."""

    setting: str = ""  # the exact flag, variable or call
    change: str  # what to change, what that does, and when it helps
    cost: str = ""  # what it costs, and what it does not go together with

    @property
    def text(self) -> str:
        return f"{self.setting}: {self.change}" if self.setting else self.change

    @property
    def costs(self) -> str:
        """`` Cost: ...`` to append to the change; empty if no cost is known."""
        return f" Cost: {self.cost}" if self.cost else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A conclusion from the numbers."""

    name: str
    weight: Weight
    title: str  # a clause that can stand within a sentence
    text: str
    # The numbers that it is based on; a name ends in the unit.
    figures: Mapping[str, Figure] = field(default_factory=dict)
    advice: tuple[Advice, ...] = ()

    @property
    def sentence(self) -> str:
        return f"{self.title}. {self.text}" if self.text else self.title


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFinding(Finding):
    """A finding, and where it was found: in an open incident, the engine that runs, its start, its host, the set-up."""

    where: Where


def finding(
    name: str,
    figures: Mapping[str, Figure] | None = None,
    /,
    *,
    weight: Weight | None = None,
    advice: Iterable[str] | None = None,
    **words: object,
) -> Finding:
    """Return the finding of that name, a key of findings.toml.

    Its sentences may name ``words``, and the figures that are shown with it: those that the file finds in ``words``,
    and ``figures``, whose names only the rule knows. ``weight`` and ``advice`` replace the file's.
    """
    wording = _WORDING[name]
    figures = {key: _found(path, words) for key, path in wording.get("figures", {}).items()} | dict(figures or {})
    known = {**words, **figures}
    return Finding(
        name=name,
        weight=weight or wording["weight"],
        title=_sentences(wording["title"], known)[0],
        text=" ".join(_sentences(wording.get("text", []), known)),
        figures=figures,
        advice=advices(wording.get("advice", ()) if advice is None else advice)
        + tuple(Advice(change=change) for change in _sentences(wording.get("change", []), known)[:1]),
    )


def capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def in_words(found: Finding) -> str:
    first = "".join(f" First: {advice.setting}. {advice.change}{advice.costs}" for advice in found.advice[:1])
    return f"{capital(found.title)}. {found.text}{first}"


def weightiest_first(findings: Iterable[Finding | None]) -> list[Finding]:
    return sorted((each for each in findings if each is not None), key=lambda each: WEIGHTS.index(each.weight))


def all_advice(findings: Iterable[Finding]) -> tuple[Advice, ...]:
    return tuple(dict.fromkeys(each for finding in findings if finding.weight != "note" for each in finding.advice))


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _found(path: str, words: Mapping[str, object]) -> Any:  # noqa: ANN401 - whatever the rule handed over
    first, *attributes = path.split(".")
    value = words[first]
    for attribute in attributes:
        value = None if value is None else getattr(value, attribute)
    return value


class _LeftOutError(Exception):
    """The condition of a sentence does not hold."""


_CONDITIONS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "if": bool,
    "not": lambda value: not value,
    "known": lambda value: value is not None,
}
_FORMATS: Final[Mapping[str, Callable[[Any], str]]] = {
    "size": size_text,
    "+size": partial(size_text, signed=True),
    "times": times,
    "span": span_text,
    "Capital": capital,
}


class _Wording(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401 - the base class's
        if format_spec in _CONDITIONS:
            if not _CONDITIONS[format_spec](value):
                raise _LeftOutError
            return ""
        return _FORMATS[format_spec](value) if format_spec in _FORMATS else format(value, format_spec)


def _sentences(templates: str | list[str], known: Mapping[str, object]) -> list[str]:
    said = []
    for template in [templates] if isinstance(templates, str) else templates:
        try:
            said.append(_Wording().vformat(template, (), known))
        except _LeftOutError:
            continue
    return said


# --- advice ---


ADVICE: Final[Mapping[str, Advice]] = {
    name: Advice(**row)
    for name, row in tomllib.loads(Path(__file__).with_name("advice.toml").read_text("utf-8")).items()
}
COMPONENT_MEANING: Final[Mapping[str, str]] = {row.name: row.explained for row in COMPONENTS}


def advices(names: Iterable[str]) -> tuple[Advice, ...]:
    return tuple(ADVICE[name] for name in dict.fromkeys(names))


def without_effect(ranks: Iterable[RankReading]) -> frozenset[str]:
    fragmenting = [rank for rank in ranks if rank.device.traits.fragments_below_allocator]
    if not all(rank.launch.expandable_segments for rank in fragmenting):
        return frozenset()
    return frozenset(name for rank in fragmenting for name in rank.device.traits.against_fragmentation)


def against_fragmentation(device_type: str | None) -> tuple[str, ...]:
    return device_traits(device_type).against_fragmentation


def for_given_pool(given: Iterable[Advice]) -> tuple[Advice, ...]:
    """Return advice for an engine that was started with its KV cache's size: no share of the device counts there."""
    void = advices(("gpu_memory_utilization", "kv_cache_memory_bytes", "more_for_the_kv_cache"))
    return tuple(dict.fromkeys(ADVICE["given_kv_cache"] if each in void else each for each in given))
