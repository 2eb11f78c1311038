"""The picture is well-formed, bounded, true to scale, and says what it left out."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from hypothesis import given, settings

from highwater.snapshots.model import parse
from highwater.snapshots.picture import MAX_BARS, MAX_CELLS, bars_of, svg
from tests.unit.snapshots.made import MIB, block, fragmented, segment, snapshot, snapshots


def drawn(raw, title="some.pickle"):
    return svg(bars_of(parse(raw)), title)


@settings(max_examples=30)
@given(snapshots())
def test_any_snapshot_can_be_drawn(raw):
    """And every bar is as long as its segment."""
    ET.fromstring(drawn(raw))  # noqa: S314 - our own text
    for bar in bars_of(parse(raw))["bars"]:
        assert sum(size for _, size in bar["runs"]) == bar["bytes"]


def test_a_title_is_text():
    """It is a file's name: anybody's words."""
    picture = ET.fromstring(drawn(fragmented(), '<script>"&'))  # noqa: S314 - our own text
    assert '<script>"&' in "".join(picture.itertext())
    assert not [element for element in picture.iter() if element.tag.endswith("script")]


def test_it_is_bounded_and_says_what_is_missing():
    """The largest segments are shown; ten thousand blocks in one are shown as cells."""
    many = [segment([block(MIB)] * (2 if index else 3), address=index) for index in range(MAX_BARS + 7)]
    assert "Left out: 7, 14.0 MiB." in drawn(snapshot(many))
    blocks = [block(512, "live" if index % 2 else "free") for index in range(10_000)]
    (bar,) = bars_of(parse(snapshot([segment(blocks)])))["bars"]
    assert (len(bar["runs"]), sum(size for _, size in bar["runs"])) == (MAX_CELLS, bar["bytes"])


def test_a_cell_has_the_state_that_most_of_it_is_in():
    """A large hole stays visible between crumbs."""
    crumbs = [block(512, "live" if index % 2 else "free") for index in range(1_000)]
    (bar,) = bars_of(parse(snapshot([segment([block(MIB, "free"), *crumbs, block(MIB)])])))["bars"]
    assert (bar["runs"][0][0], bar["runs"][-1][0]) == ("free", "live")
