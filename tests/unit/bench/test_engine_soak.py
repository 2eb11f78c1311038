"""The engine's soak: its mix is mixed, what failed is counted, and its block says how far it came."""

from __future__ import annotations

import re
from pathlib import Path

from bench.engine_soak.page import facts, figures, with_run
from bench.engine_soak.traffic import REST_SECONDS, SIDES, Counts, Mix, video_url
from highwater.growth.floors import HOST_IDLE_SECONDS

MB = 1_000_000


def run(sizes, **changes):
    made = {
        "minutes": 120.0,
        "day": "2026-11-23",
        "machine": "two cores",
        "seconds": 600.0,
        "clients": 4,
        "samples": [{"at": 5.0, "sidecar_rss_bytes": size * MB, "used_bytes": 700 * MB} for size in sizes],
        "requests": Counts().as_json() | {"sent": {"image": 90, "text": 10}, "images_by_side": {"4096": 3, "64": 7}},
        "growth": None,
        "growth_problem": "GET /memory/growth answered 404",
        "complete": True,
    }
    return made | changes


def met(found):
    return [figure.goal.is_met(figure.value) for figure in figures(found)]


def test_memory_that_grows_is_not_flat():
    """From a sixth of the run to its end: what a start takes is no growth."""
    assert met(run([40, 60, *[80] * 60])) == [True, True]
    assert met(run([80] * 30 + [88] * 30)) == [True, True]
    assert met(run([80] * 30 + [89] * 30)) == [True, False]


def test_one_failed_request_is_too_many():
    """Of whatever kind."""
    requests = run([])["requests"] | {"failed": {"video": 1}, "errors": ["video: APIError: 500"]}
    found = run([80] * 60, requests=requests)
    assert met(found) == [False, True]
    assert "Failed: video: APIError: 500" in facts(found)


def test_a_run_that_goes_on_says_so():
    """The block can be written at any time."""
    assert "**The run was not over when this was written.**" in facts(run([80], complete=False))
    assert not [line for line in facts(run([80])) if "not over" in line]


def test_the_block_replaces_the_last_one():
    """And nothing else of the page."""
    page = (Path(__file__).parents[3] / "docs" / "figures.md").read_text("utf-8")
    text = with_run(with_run(page, run([80] * 60)), run([81] * 60))
    assert text.count("make soak MINUTES=120` on") == 1
    outside = re.compile(r"<!-- engine run -->.*<!-- end of engine run -->", re.DOTALL)
    assert outside.sub("", text) == outside.sub("", page)


def test_the_mix_has_every_kind_size_and_repeats():
    """Up to 4,096 pixels a side; the same seed draws the same."""
    counts = Counts()
    mix = Mix(1, counts)
    kinds = {mix.request(with_videos=True)[0] for _ in range(60)}
    assert kinds == {"image", "text", "video"}
    assert counts.repeated > 5
    assert set(counts.images_by_side) <= {str(side) for side in SIDES}
    again = Mix(2, Counts())
    assert {again.request(with_videos=False)[0] for _ in range(30)} == {"image", "text"}


def test_a_video_is_several_pictures():
    """As vLLM takes one without a container."""
    head, _, frames = video_url(3).partition(",")
    assert (head, frames.count(",")) == ("data:video/jpeg;base64", 3)


def test_each_rest_is_long_enough_for_an_idle_floor():
    """With some seconds for the sidecar to see it: without floors no series has a verdict."""
    assert REST_SECONDS >= HOST_IDLE_SECONDS + 5.0
