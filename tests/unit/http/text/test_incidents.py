"""An incident as a page and as text: all of it is there, and nothing in it is obeyed by a browser or a terminal."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from highwater.diagnose.case import of_incident
from highwater.diagnose.evidence import Headline, Incident, RankEvidence
from highwater.diagnose.finding import ADVICE, Finding
from highwater.diagnose.incidents.diagnosis import summarize
from highwater.diagnose.log.story import LogStory
from highwater.host.reading import ProcessMemory
from highwater.http.text.incidents import headlines_text, incident_markdown, state
from highwater.http.text.markdown import CONTENT_SECURITY_POLICY, figure, moment, page
from highwater.model.engine import EngineLoad, EngineStatus
from highwater.model.growth import Growth
from highwater.model.policy import PolicyStatus
from highwater.model.report import Event
from tests.fakes.incident import AT, MIB, diagnosed, entry, evidence, rank, reading, series, unknown
from tests.unit.diagnose.log.prefixes import match

FULL = 61_548 * MIB
MESSAGES = match(["NPU out of memory. NPUWorkspaceAllocator tried to allocate 180.00 MiB", "EngineDeadError"])
ATTACKS = [
    "<script>alert(1)</script>",
    "</pre></body><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "</style><style>*{display:none}",
    "&lt;script&gt;",
    "javascript:alert(1)",
    "\x1b]0;owned\x07\x1b[2J",
    "\u202eevil\nsecond line\r\nthird",
]
# What a page of ours is made of.
ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "strong", "pre", "code", "div", "span"),
    *("table", "thead", "tbody", "tr", "th", "td", "ul", "li", "svg", "text", "polyline"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "name", "content", "class", "role", "aria-label"),
    *("viewbox", "points", "x", "y"),
}


def incident(*ranks: RankEvidence, **changes) -> Incident:
    """The story's end: two full NPUs, one of them dead, and a log that says why."""
    ranks = ranks or (
        rank(reading(0, used=FULL), series=series(reading(0), [40_000 * MIB, FULL]), entries=(entry(),)),
        rank(reading(1, used=FULL), status="dead", doing="in a step for 61 s", stack=("npu.py:12 forward",)),
    )
    given = evidence("died", *ranks, growth=Growth(since_ready_bytes=9_000 * MIB), load=EngineLoad())
    findings = diagnosed(given)
    made = {
        "id": "20261121T143233Z-died",
        "kind": "died",
        "at": AT,
        "last_at": AT,
        "summary": summarize(of_incident(given, LogStory(messages=MESSAGES)), findings),
        "engine": EngineStatus(url="http://127.0.0.1:8000", state="gone", version="0.12.0", model="Qwen/Qwen3-VL-8B"),
        "findings": findings,
        "messages": MESSAGES,
        "ranks": ranks,
        "events": (Event(id=1, at=AT - 1, kind="state", summary="engine ready -> down"),),
        "decisions": (Event(id=1, at=AT - 9, kind="policy", summary="device: above"),),
        "policy": PolicyStatus(level="short", mode="observe", summary="rank 0 lacks 1 GiB"),
        "notes": ("something is not known",),
    }
    return Incident(**made | changes)


def incident_text(shown: Incident) -> str:
    return incident_markdown(shown)


def incident_page(shown: Incident) -> str:
    return page(incident_markdown(shown, charts=True), title=shown.id)


class Page(HTMLParser):
    """What a browser would see: elements, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in {"meta", "polyline"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


TOLD = [
    "20261121T143233Z-died",
    "2026-11-21 14:32:33Z",
    "still open",
    "vLLM 0.12.0 Qwen/Qwen3-VL-8B at http://127.0.0.1:8000: gone",
    "The engine died",
    "an operator's workspace found no room on the NPU",
    "rank 0 had 872 MiB free of 60.96 GiB",
    "--gpu-memory-utilization",
    "Costs:",
    "60.11",
    "in a step for 61 s",
    "npu.py:12 forward",
    "abababab",
    "engine ready -> down",
    "device: above",
    "something is not known",
    "dead",
]


@pytest.mark.parametrize("words", TOLD)
def test_text_and_page_tell_it_all(words):
    assert words in " ".join(incident_text(incident()).split())
    assert words in " ".join(Page(incident_page(incident())).text.split())


def test_advice_is_given_once():
    text = incident_text(incident())
    assert text.count(f"- `{ADVICE['gpu_memory_utilization'].setting}`\n") == 1


def test_what_is_unknown_is_shown_as_unknown():
    nothing = Incident(
        id="20261121T143233Z-hung",
        kind="hung",
        at=AT,
        last_at=AT,
        summary="The engine hung: the cause is not known",
        engine=EngineStatus(url="http://engine", state="stuck"),
    )
    for shown in (incident_text(nothing), Page(incident_page(nothing)).text):
        assert "(version unknown)" in shown
        assert "not known" in shown
        assert "None" not in shown


def test_unknown_ranks_are_shown():
    empty = replace(rank(unknown()), reading=None)
    blank = rank(unknown(1), series=tuple(replace(point, used_bytes=None) for point in series(reading(1), [1, 2])))
    shown = incident(empty, blank)
    assert "None" not in incident_text(shown)
    assert "svg" not in Page(incident_page(shown)).elements


# --- nothing is obeyed ---


def attacked(attack: str) -> Incident:
    """Every foreign text of an incident, and its own."""
    known = reading(0, device=replace(reading().device, name=attack), host=attack)
    bad = rank(known, status=attack, doing=attack, stack=(attack,), entries=(entry(attack, residency=attack),))
    finding = Finding(name=attack, weight="clue", title=attack, text=attack, figures={attack: attack, "rank": attack})
    message = replace(MESSAGES[0], name=attack, title=attack, meaning=attack, lines=(attack, attack))
    happened = Event(id=1, at=AT, kind=attack, summary=attack)
    return incident(
        bad,
        id=attack,
        summary=attack,
        engine=EngineStatus(url=attack, state=attack, version=attack, model=attack, hint=attack),
        reason=attack,
        findings=(finding,),
        messages=(message,),
        events=(happened,),
        decisions=(happened,),
        policy=PolicyStatus(level=attack, mode=attack, summary=attack),
        notes=(attack,),
    )


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_page_shows_foreign_text_as_text(attack):
    shown = Page(incident_page(attacked(attack)))
    assert shown.elements <= ELEMENTS
    assert shown.attributes <= ATTRIBUTES
    assert shown.open == []
    word = next(part for part in re.split(r"[^\w(]", attack) if len(part) > 3)
    assert shown.text.count(word) >= 15


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_text_is_plain(attack):
    text = incident_text(attacked(attack)) + headlines_text(
        [
            Headline(schema=1, id=attack, kind="died", at=AT, summary=attack),
            Headline(schema=2, id=attack, kind=None, at=None, problem=attack),
        ],
        problem=attack,
    )
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert not any(line.startswith(("second line", "third")) for line in text.splitlines())


def test_the_page_needs_nothing_and_runs_nothing():
    shown = incident_page(incident())
    assert not Page(shown).elements & {"script", "link", "img", "iframe", "form", "a", "base", "object"}
    style = re.search(r"<style>(.*?)</style>", shown, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in CONTENT_SECURITY_POLICY
    assert CONTENT_SECURITY_POLICY.startswith("default-src 'none'; ")
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "url(" not in style
    assert " style=" not in shown


def test_each_rank_has_its_line():
    shown = incident_page(incident())
    (points,) = re.findall(r'points="([^"]+)"', shown)
    places = [tuple(map(float, place.split(","))) for place in points.split()]
    assert places == sorted(places)
    assert places[0][1] > places[-1][1]
    assert re.search(r"rank 0 used 39\.06 GiB to 60\.11 GiB in 0\.\d s, 60\.11 GiB at the end\.", Page(shown).text)


# --- words ---


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("free_bytes", 180 * MIB, "free 180 MiB"),
        ("rank 0 used_bytes", 1536 * MIB, "rank 0 used 1.50 GiB"),
        ("bytes_per_second", MIB, "slope +60.0 MiB a minute"),
        ("kv_cache_usage_ratio", 0.97, "kv cache usage 97.0%"),
        ("age_seconds", 0.5, "age 0.5 s"),
        ("rank", "rank 1", "rank 1"),
        ("rise", 3, "rise 3"),
        ("capacity_bytes", None, "capacity bytes not known"),
        ("free_bytes", float("nan"), "free nan B"),
    ],
)
def test_figures_have_their_units(name, value, shown):
    assert figure(name, value) == shown


@pytest.mark.parametrize(
    ("at", "shown"),
    [(AT, "2026-11-21 14:32:33Z"), (None, "-"), (1e30, "1e+30"), (float("nan"), "nan"), (-1e30, "-1e+30")],
)
def test_moments(at, shown):
    assert moment(at) == shown


def test_the_state_tells_how_often_and_until_when():
    headline = incident(count=3, last_at=AT + 28, ended_at=AT + 149).headline
    assert state(headline) == (
        "2026-11-21 14:32:33Z, 3 times until 2026-11-21 14:33:01Z, ready again 2026-11-21 14:35:02Z (after 2 min 29 s)"
    )


def test_an_empty_list_says_so():
    assert headlines_text([]) == "no incidents\n"
    assert headlines_text([], problem="it is full") == "problem: it is full\n\nno incidents\n"


def test_a_list_tells_each_in_short():
    other = Headline(schema=2, id="20261122T000000Z-died", kind=None, at=None, problem="is of schema 2")
    text = headlines_text([other, incident().headline])
    assert text.endswith("\n`highwater incidents 20261121T143233Z-died` shows what to change; so does each ID\n")
    assert "`highwater incidents ID` shows" in headlines_text([other])
    assert text.startswith(
        "20261122T000000Z-died\n   it is of schema 2\n\n20261121T143233Z-died  (died)\n   2026-11-21 14:32:33Z"
    )


def test_an_incident_whose_kind_changed_says_so():
    changed = incident()
    shown = incident_markdown(replace(changed, id="20261121T143233Z-hung"))
    assert "- id: it keeps the kind that the incident began with" in shown
    assert "it keeps the kind" not in incident_markdown(changed)
    second = replace(changed, kind="start_failed", id="20261121T143233Z-start-failed-2")
    assert "it keeps the kind" not in incident_markdown(second)
    assert "it keeps the kind" in incident_markdown(replace(second, id="20261121T143233Z-hung-2"))
    assert "20261121T143233Z-died  (died)" in headlines_text([changed])


def test_the_time_until_a_device_is_full_is_a_duration():
    assert figure("seconds_to_full", 26215.43159591661) == "full in 7 h 16 min"


def test_a_stopped_rank_is_told_how_to_go_on():
    found = {one.name: one for one in diagnosed(evidence("hung", rank(reading(0), status="stopped", pid=4242)))}
    assert "Process: 4242." in found["stopped_ranks"].text
    assert found["stopped_ranks"].advice == (ADVICE["continue_process"], ADVICE["restart"])


def test_a_stopped_engine_core_is_told_how_to_go_on():
    core = ProcessMemory(role="engine_core", name="EngineCore", pid=4242)
    waits = replace(evidence("hung", rank(reading(0), status="alive", pid=50)), stopped=(core,))
    found = {one.name: one for one in diagnosed(waits)}["stopped_ranks"]
    assert (found.title, found.weight) == ("EngineCore was stopped by a signal or a debugger", "likely")
    assert "Process: 4242." in found.text
    assert found.figures == {"EngineCore pid": 4242}
    assert found.advice == (ADVICE["continue_process"], ADVICE["restart"])
    both = replace(evidence("hung", rank(reading(0), status="stopped", pid=4242)), stopped=(core,))
    assert {one.name: one for one in diagnosed(both)}["stopped_ranks"].figures == {"rank 0 pid": 4242}
