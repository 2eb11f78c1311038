"""The two forms of the report: the story's numbers, the same in both, whoever wrote the names in it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from app.experiment.experiment import CachedOutput, Experiment, Happened
from app.experiment.markdown import markdown
from app.experiment.page import CONTENT_SECURITY_POLICY, page
from app.experiment.report import document
from app.experiment.timeline import timelines, used_line
from tests.unit.experiment.story import MIB, START, point, story

NASTY = "</style><script>alert(1)</script><img src=x onerror=y> | `code` ``` **bold** [a](http://x) @octocat #1"


def both(e: Experiment) -> tuple[str, str]:
    made = document(e, written_at=START + 100)
    return page(made), markdown(made, used_line(e, 48))


def cells(text: str, name: str, nth: int = 0) -> list[str]:
    found = re.findall(rf"^\| (?:\*\*)?{re.escape(name)}(?:\*\*)? \|(.*)\|$", text, re.MULTILINE)
    return [cell.strip().strip("*") for cell in found[nth].split("|")]


class Tags(HTMLParser):
    """Every element of a page, and what it names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.shown += data


def test_the_storys_table():
    """Ready, peak, after the load, after each remedy; per rank and component, summing to what is used."""
    _, text = both(story())
    heads, used = cells(text, "MiB"), cells(text, "used")
    told = dict(zip(heads, used, strict=True))
    assert (told["ready"], told["after load"]) == ("57,766.0", "61,548.0")
    parts = ["weights", "KV cache", "encoder cache", "other tensors", "allocator reserve", "non-torch"]
    for column in range(len(heads)):
        summed = sum(float(cells(text, part)[column].replace(",", "")) for part in parts)
        assert summed == pytest.approx(float(used[column].replace(",", "")), abs=0.3)


def test_what_each_remedy_freed():
    """Growth with its sign, what came back without one."""
    _, text = both(story())
    freed = dict(zip(cells(text, "MiB", 1), cells(text, "encoder cache", 1), strict=True))
    assert (freed["growth"], freed["release freed"], freed["trim_encoder_cache freed"]) == (
        "+3,782.0",
        "0.0",
        "3,782.0",
    )


def test_unknown_is_a_dash_and_never_nothing():
    """As on CPU, where PyTorch keeps no statistics."""
    e = story()
    lost = replace(e, moments=tuple(replace(m, ranks=m.ranks[:1]) if m.name == "peak" else m for m in e.moments))
    _, text = both(lost)
    second = cells(text, "used", 2)
    assert second[cells(text, "MiB").index("peak under load")] == "-"


def test_many_ranks_are_summed_and_folded():
    """The sum of all stands first; the ranks are shown on demand."""
    e = story()
    ranks = tuple(point(rank, START) for rank in range(8))
    wide = replace(e, moments=tuple(replace(m, ranks=ranks) for m in e.moments))
    html, text = both(wide)
    assert html.count("<details>") == text.count("<details>") == 16
    assert cells(text, "used")[0] == "462,128.0"


def test_both_forms_say_the_same():
    """Every number of the page stands in the Markdown."""
    html, text = both(story())
    shown = Tags(html.partition("<main>")[2]).shown.partition("Timeline")[0]
    numbers = set(re.findall(r"\d[\d,]*\.\d", shown))
    assert numbers
    assert {number for number in numbers if number not in text} == set()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "device_free_bytes under 1,560.0 MiB: release"),
        ({"high_free": {(0, 0): MIB, (0, 1): 2 * MIB}}, "device_free_bytes under 1.0 or 2.0 MiB: release"),
        ({"high_free": {}}, "device_free_bytes by the engine's plan: release"),
        ({"signal": "device_used_ratio", "high_water": 0.93}, "device_used_ratio >= 0.93: release"),
        ({"high_water": 2.0 * 1024 * MIB}, "device_free_bytes <= 2,048.0 MiB: release"),
    ],
)
def test_a_rule_is_told_with_where_it_acts(changed, told):
    """At a value, or with less free than the engine's plan leaves each rank."""
    e = story()
    _, text = both(replace(e, rules=(replace(e.rules[0], **changed),)))
    assert told in text


def test_the_page_needs_nothing_and_runs_nothing():
    """No script, nothing fetched, no style but its own; a policy that says so."""
    html, _ = both(story())
    tags = Tags(html)
    assert tags.names.isdisjoint({"script", "img", "link", "iframe", "object", "form", "base"})
    assert {name for name, _ in tags.attributes}.isdisjoint({"src", "href", "style", "xlink:href", "onclick"})
    assert ("content", CONTENT_SECURITY_POLICY) in tags.attributes
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "url(" not in html
    assert "@import" not in html


def hostile() -> Experiment:
    e = story()
    return replace(
        e,
        name=NASTY,
        load=replace(e.load, command=(NASTY, "x")),
        engine=replace(e.engine, model=NASTY, url=NASTY),
        steps=tuple(replace(step, reason=NASTY) for step in e.steps),
        events=(Happened(at=START, kind=NASTY, summary=NASTY, trigger=NASTY),),
        caches=tuple(replace(c, largest=(CachedOutput(mm_hash=NASTY, bytes=1),)) for c in e.caches),
        settings={"--limit": NASTY},
        notes=(NASTY,),
    )


def test_names_cannot_become_html():
    """Whoever wrote them."""
    html, _ = both(hostile())
    assert Tags(html).names.isdisjoint({"script", "img"})
    assert "alert(1)" in Tags(html).shown


def test_names_cannot_become_markdown():
    """In code they stay as they are, elsewhere they are escaped; no cell is cut by a pipe."""
    _, text = both(hostile())
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"(?ms)^(````*)\w*\n.*?^\1$", "", text))
    assert "<script" not in outside
    assert "<img" not in outside
    assert re.search(r"(?<!\\)\[a\]\(", outside) is None
    assert "@octocat" not in outside
    for line in text.splitlines():
        if line.startswith("| reset_mm_cache"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 7


def test_the_charts_are_drawings():
    """Well-formed, told in words, coloured by class; what moved apart from all that is in use."""
    html, _ = both(story())
    charts = [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]  # noqa: S314 - ours
    assert len(charts) == 4
    assert charts[0].attrib["aria-label"].startswith("All memory in use, rank 0, MiB: weights 30,002")
    classes = {each.attrib.get("class", "") for chart in charts for each in chart.iter()}
    assert any("c-encoder_cache_bytes" in each for each in classes)


def test_a_chart_keeps_its_peak():
    """However many readings there are, each step shows the highest of them."""
    e = story()
    highest = max(each.used_bytes for each in e.series[0, 0]) / 2**20
    whole, moved = list(timelines(e))[:2]
    assert max(sum(values) for values in zip(*(line.values for line in whole.lines), strict=True)) == highest
    assert max(used_line(e, 12)[2]) == highest
    assert [line.name for line in moved.lines] == ["used", "other tensors", "encoder cache", "allocator reserve"]


def test_nothing_read_is_no_chart():
    """One reading is no line."""
    e = replace(story(), series={(0, 0): story().series[0, 0][:1]})
    html, text = both(e)
    assert "<svg" not in html
    assert "mermaid" not in text


def test_moments_that_stand_close_share_a_label():
    """They would be written over each other."""
    (whole, *_) = timelines(story())
    assert [tick.label for tick in whole.ticks] == ["1", "2-3", "4"]
    assert whole.key == ["load starts", "load ends", "after release", "after trim_encoder_cache"]
