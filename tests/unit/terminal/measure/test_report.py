"""The two forms of the report: the story's numbers, the same in both, whoever wrote the names in it."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from highwater.diagnose.evidence import EncoderEntry, Experiment
from highwater.http.text.markdown import CHART_POINTS, evenly, page
from highwater.model.policy import RankPressure
from highwater.model.report import Event
from highwater.terminal.measure.report import report
from tests.unit.terminal.measure.story import MIB, START, point, story

NASTY = "</style><script>alert(1)</script><img src=x onerror=y> | `code` ``` **bold** [a](http://x) @octocat #1"


def both(e: Experiment) -> tuple[str, str]:
    made = report(e, written_at=START + 100)
    return page(made, title=e.name), made


def cells(text: str, name: str, nth: int = 0) -> list[str]:
    found = re.findall(rf"^\| (?:\*\*)?{re.escape(name)}(?:\*\*)? *\|(.*)\|$", text, re.MULTILINE)
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
    _, text = both(story())
    heads, used = cells(text, "MiB"), cells(text, "used")
    told = dict(zip(heads, used, strict=True))
    assert (told["ready"], told["after load"]) == ("57,766.0", "61,548.0")
    parts = ["weights", "KV cache", "encoder cache", "other tensors", "allocator reserve", "non-torch"]
    for column in range(len(heads)):
        summed = sum(float(cells(text, part)[column].replace(",", "")) for part in parts)
        assert summed == pytest.approx(float(used[column].replace(",", "")), abs=0.3)


def test_what_each_remedy_freed():
    _, text = both(story())
    freed = dict(zip(cells(text, "MiB", 1), cells(text, "encoder cache", 1), strict=True))
    assert (freed["growth"], freed["release freed"], freed["trim_encoder_cache freed"]) == (
        "+3,782.0",
        "0.0",
        "3,782.0",
    )


def test_the_figures_of_what_one_remedy_freed_are_explained_in_one_place():
    _, text = both(story())
    (line,) = (line for line in text.splitlines() if line.startswith("- freed: "))
    assert all(word in line for word in ("traffic's part included", "MiB changed", "An event", "credited"))


def test_unknown_is_a_dash_and_never_nothing():
    """As on CPU, where PyTorch keeps no statistics."""
    e = story()
    lost = replace(e, moments=tuple(replace(m, ranks=m.ranks[:1]) if m.name == "peak" else m for m in e.moments))
    _, text = both(lost)
    second = cells(text, "used", 2)
    assert second[cells(text, "MiB").index("peak under load")] == "-"


def test_many_ranks_are_summed_and_folded():
    e = story()
    ranks = tuple(point(rank, START) for rank in range(8))
    wide = replace(e, moments=tuple(replace(m, ranks=ranks) for m in e.moments))
    html, text = both(wide)
    assert html.count("<details>") == text.count("<details>") == 16
    assert cells(text, "used")[0] == "462,128.0"


def test_both_forms_say_the_same():
    html, text = both(story())
    shown = Tags(html.partition("<body>")[2]).shown
    numbers = set(re.findall(r"\d[\d,]*\.\d", re.sub(r"(?s)```mermaid.*?```", "", text)))
    assert len(numbers) > 50
    assert {number for number in numbers if number not in shown} == set()


def waters(*sizes: int) -> tuple[RankPressure, ...]:
    return tuple(RankPressure(rank=rank, dp_rank=0, high_free_bytes=size) for rank, size in enumerate(sizes))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "device_free_bytes under 1.52 GiB: release"),
        ({"ranks": waters(512 * MIB, 2048 * MIB)}, "device_free_bytes under 0.50 GiB or 2.00 GiB: release"),
        ({"ranks": ()}, "device_free_bytes by the engine's plan: release"),
        ({"ranks": (), "signal": "device_used_ratio", "high_water": 0.93}, "device_used_ratio >= 0.93: release"),
        ({"ranks": (), "high_water": 2.0 * 1024 * MIB}, "device_free_bytes <= 2.00 GiB: release"),
    ],
)
def test_a_rule_is_shown_with_where_it_acts(changed, told):
    e = story()
    rule = replace(e.policy.rules[0], **changed)
    _, text = both(replace(e, policy=replace(e.policy, rules=(rule,))))
    assert told in text


def hostile() -> Experiment:
    e = story()
    return replace(
        e,
        name=NASTY,
        load=replace(e.load, command=(NASTY, "x")),
        engine=replace(e.engine, model=NASTY, url=NASTY),
        remedies=tuple(replace(result, reason=NASTY) for result in e.remedies),
        events=(Event(id=1, at=START, kind=NASTY, summary=NASTY, trigger=NASTY),),
        caches=tuple(replace(c, largest=(EncoderEntry(mm_hash=NASTY, bytes=1),)) for c in e.caches),
        settings={"--limit": NASTY},
        notes=(NASTY,),
    )


def test_names_cannot_become_html():
    html, _ = both(hostile())
    tags = Tags(html)
    assert tags.names.isdisjoint({"script", "img", "link", "iframe", "object", "form", "base"})
    assert {name for name, _ in tags.attributes}.isdisjoint({"src", "href", "style", "xlink:href", "onclick"})
    assert "alert(1)" in tags.shown


def test_names_cannot_become_markdown():
    _, text = both(hostile())
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"(?ms)^(````*)\w*\n.*?^\1$", "", text))
    assert "<script" not in outside
    assert "<img" not in outside
    assert re.search(r"(?<!\\)\[a\]\(", outside) is None
    assert "@octocat" not in outside
    for line in text.splitlines():
        if line.startswith("| reset_mm_cache"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 7


def test_the_chart_is_a_drawing():
    html, text = both(story())
    assert html.count("<svg") == html.count("<polyline") == 1
    assert 'aria-label="MiB in use, rank ' in html
    assert "The moments in it: load starts at 4.0 s, load ends at 66.0 s" in text


def test_a_chart_keeps_its_peak():
    points = [(reading.taken_at, float(reading.used_bytes)) for reading in story().series[0, 0]]
    steps = evenly(points, CHART_POINTS)
    assert (len(steps), max(steps)) == (CHART_POINTS, max(used for _, used in points))
    assert evenly([(0.0, 1.0), (9.0, 2.0), (10.0, 1.0)], 3) == [1.0, 1.0, 2.0]


def test_nothing_read_is_no_chart():
    e = replace(story(), series={(0, 0): story().series[0, 0][:1]})
    html, text = both(e)
    assert "<svg" not in html
    assert "mermaid" not in text


def test_what_ctrl_c_left_out_is_shown():
    _, text = both(replace(story(), not_tried=("reset_encoder_cache",)))
    assert cells(text, "reset_encoder_cache")[0] == "interrupted"
    assert "by 2 of 4 remedies" in text
