"""The dashboard in a real browser, on a sidecar before the fake engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe

from highwater.act.rules import PolicySettings, Rule
from highwater.host.reader import HostReader
from highwater.host.reading import HostReading, ProcessMemory
from highwater.model.components import COMPONENT_NAMES
from highwater.terminal.demo.process import free_port
from highwater.terminal.demo.sidecar import DemoSidecar
from tests.browser.conftest import ELSEWHERE, beside
from tests.browser.measure import RING, an_hour_of_eight, flood, heap_bytes, times_to_paint
from tests.browser.sample import Story, an_hour
from tests.fakes.engine import CACHED, IMAGE_BYTES, IMAGES, MIB, TOTAL, USED_AFTER, FakeEngine
from tests.fakes.incident import evidence, rank, reading
from tests.fakes.started import story, wire
from tests.http.conftest import serving
from tests.http.test_control_plane import TOKEN
from tests.unit.host.recorded import reading as host_reading

GIB = 1024**3
HOSTILE = "<img src=x onerror=window.pwned=1><script>window.pwned=1</script>&amp;"
UNKNOWN, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
WATERS = """async key => {
  const { inspect } = await import("./dashboard/main.js");
  const { waters } = inspect.plots.stacks.get(key).chart.view;
  return Object.fromEntries(waters.filter((one) => !one.solid).map((one) => [one.variable, one.value]));
}"""
# Of each chart beside the stacks: the first and the last moment that it has drawn.
DRAWN = """async () => {
  const { inspect } = await import("./dashboard/main.js");
  const shown = Object.entries(inspect.plots.lines).filter(([, plot]) => plot.chart);
  const charts = shown.map(([kind, plot]) => [kind, plot.chart]);
  while (charts.some(([, chart]) => !chart.plot)) await new Promise((resolve) => requestAnimationFrame(resolve));
  return charts.map(([kind, chart]) => {
    const times = chart.plot.data[0];
    return [kind, [times[0], times[times.length - 1]]];
  });
}"""
# Whether a line of each rank's chart ends between its first and its last value.
HAS_GAP = """async () => {
  const { inspect } = await import("./dashboard/main.js");
  return [...inspect.plots.stacks.values()].map(({ chart }) => chart.view.data[1].slice(1, -1).includes(null));
}"""
ALL_HAVE_GAPS = f"() => ({HAS_GAP})().then((gaps) => gaps.every(Boolean))"
RATES = """async () => {
  const { inspect } = await import("./dashboard/main.js");
  return inspect.plots.lines["request-rate"].chart.view.data.slice(1);
}"""
# The moments that a chart which is seen is given; those further down are drawn in time.
GIVEN = """async () => {
  const { inspect } = await import("./dashboard/main.js");
  return [...inspect.plots.stacks.values()][0].chart.view.data[0];
}"""
KEPT = """async () => {
  const { inspect } = await import("./dashboard/main.js");
  const line = inspect.plots.lines["host-container"];
  while (!line.chart?.plot) await new Promise((resolve) => requestAnimationFrame(resolve));
  return line.chart.plot.data.map((values) => [...values].map((value) => (Number.isFinite(value) ? value : null)));
}"""
RANK_CELLS = ("used_bytes", "free_bytes", "total_bytes")


async def cell(page: Any, rank: int, field: str) -> str | None:
    return await page.get_attribute(f'[data-cell="0:{rank} {field}"]', "data-bytes")


async def number(page: Any, tile: str) -> int:
    return int(await page.get_attribute(f"[data-tile={tile}] .tile-number", "data-bytes"))


async def shown(page: Any, selector: str, text: str) -> None:
    """Wait until that text stands there."""
    await page.locator(selector).filter(has_text=text).first.wait_for()


def done(fake: FakeEngine) -> list[str]:
    """What was done to the engine; the page looks at the entries by itself."""
    return [call for call in fake.resets() if call != "encoder_cache"]


# --- numbers ---


async def test_the_numbers_are_those_of_memory(visit):
    async with beside() as here:
        here.fake.serve_images()
        await here.sidecar.poll()
        page = await visit(here.port)
        report = await here.memory()
        for rank in report["ranks"]:
            for field in RANK_CELLS:
                assert await cell(page, rank["rank"], field) == str(rank[field])
            for field in COMPONENT_NAMES:
                assert await cell(page, rank["rank"], field) == str(rank["components"][field])
        assert await number(page, "used") == USED_AFTER == report["ranks"][0]["used_bytes"]
        assert await page.inner_text("[data-tile=used] .tile-number") == "57.06"
        assert await number(page, "headroom") == report["ranks"][0]["free_bytes"]
        assert await number(page, "encoder") == report["encoder_cache"]["device_bytes"] == 2 * IMAGES * IMAGE_BYTES
        assert await number(page, "growth") == report["growth"]["since_ready_bytes"]
        assert await page.inner_text("[data-tile=growth] .tile-number") == "+7.39"


async def test_it_is_live(visit):
    async with beside() as here:
        page = await visit(here.port)
        before = await number(page, "used")
        here.fake.serve_images(4)
        here.fake.running, here.fake.waiting = 7, 2
        await here.sidecar.poll()
        await page.wait_for_selector(f'[data-tile=used] [data-bytes="{before + 4 * IMAGE_BYTES}"]')
        await shown(page, "[data-tile=requests]", "2 waiting")
        assert await page.inner_text("[data-tile=requests] .tile-number") == "7"


async def test_what_is_not_known_is_a_dash_and_no_line(visit):
    """As on CPU, where PyTorch keeps no statistics: neither 0 in the table nor 0 in a chart."""

    def tells_less(fake: FakeEngine) -> None:
        (worker,) = fake.workers
        told = worker.memory
        worker.memory = lambda now: told(now) | {"torch": {}, "weights_bytes": None}

    async with beside(tells_less, engine={"tensor_parallel": 1}) as here:
        page = await visit(here.port)
        for field in ("weights_bytes", "torch_cached_bytes", "other_tensors_bytes"):
            assert await cell(page, 0, field) == "unknown"
            assert await page.inner_text(f'[data-cell="0:0 {field}"]') == UNKNOWN
        assert await page.inner_text("[data-tile=reserved] .tile-number") == UNKNOWN
        assert not await page.locator("[data-plot=reserved]").is_visible()
        assert await page.locator("[data-plot=host]").is_visible()


async def test_a_chart_is_also_a_table(visit):
    async with beside() as here:
        here.fake.serve_images()
        await here.sidecar.poll()
        page = await visit(here.port)
        plot = page.locator('[data-plot=stack][data-rank="0:0"]')
        assert "57.06 GiB of 60.96 GiB used" in await plot.get_by_role("img").get_attribute("aria-label")
        await plot.get_by_text("As a table").press("Enter")
        row = plot.locator("tbody tr").first
        assert "3.69 GiB" in await row.inner_text()


async def test_several_ranks_show_their_skew(visit):
    async with beside(engine={"tensor_parallel": 3}) as here:
        here.fake.workers[2].non_torch += GIB
        await here.sidecar.poll()
        page = await visit(here.port)
        assert await page.get_attribute('[data-cell="skew used_bytes"]', "data-bytes") == str(GIB)
        assert "rank 2" in await page.inner_text("[data-tile=used]")


async def test_a_figure_of_several_ranks_says_of_which(visit):
    """The fullest, the one with the least left, or all together: figures of one tile row are not of the same ranks."""
    async with beside(engine={"tensor_parallel": 3}) as here:
        page = await visit(here.port)
        told = await page.locator(".tile-of").all_inner_texts()
        fullest, least, most = "fullest of 3: rank 0", "least of 3: rank 0", "most of 3: rank 0"
        assert told == [fullest, least, "sum of 3 ranks", "sum of 3 ranks", most, "sum of 3 ranks", "", "", ""]


async def test_no_line_leads_from_one_engine_to_the_next(visit):
    """Nobody measured what was between them: another process, or the same number after the engine was gone."""
    async with beside() as here:
        here.fake.serve_images()
        for is_another in (True, False):
            here.history._samples.clear()
            await here.sidecar.poll()
            if is_another:
                here.fake.start_again()
            await here.sidecar.poll()
            page = await visit(here.port)
            if is_another:
                await page.wait_for_function(ALL_HAVE_GAPS)
            assert await page.evaluate(HAS_GAP) == [is_another] * 2
        for is_down in (True, True, False):
            here.fake.down = is_down
            await here.sidecar.poll()
        for opened in (page, await visit(here.port)):  # the one that saw it, and one that knows it by the events
            await opened.wait_for_function(ALL_HAVE_GAPS)


async def test_requests_that_no_reading_saw_are_in_the_chart(visit):
    """Three a second, each over before the next reading: the gauge says 0 all the time."""
    async with beside(poll_seconds=20.0, history_seconds=86_400) as here:
        fake, traffic = here.fake, here.sidecar.app.services.exporter.counters.traffic

        def serve(_: float) -> None:
            fake.requests_ended += 3
            traffic.request_started()
            times = {"seconds": 0.1, "first_byte_seconds": 0.1}
            traffic.request_ended("completions", "POST", 200, "complete", request_bytes=1, response_bytes=1, **times)

        an_hour(here.history, fake, here.clock, serve, seconds=60)
        await here.sidecar.poll()
        page = await visit(here.port)
        by_engine, by_proxy = await page.evaluate(RATES)
        assert {round(rate) for rate in by_engine if rate is not None} == {3}
        assert {round(rate) for rate in by_proxy if rate is not None} == {1}
        assert await page.inner_text("[data-tile=requests] .tile-number") == "0"
        await shown(page, "[data-tile=requests]", "ended a second")
        await shown(page, "[data-plot=request-rate]", "60 through the proxy since the sidecar started")


async def test_growth_says_when_the_device_is_full(visit):
    """122 MiB a second on a device with 4.5 GiB left: within the minute."""
    async with beside() as here:
        fake = here.fake
        an_hour(here.history, fake, here.clock, lambda ago: fake.serve_images(1) if ago <= 20 else None, 60)
        # Or only what came since this engine was up would count.
        here.sidecar.app.services.poller._up_since -= 60
        here.history._cut_at -= 60
        await here.sidecar.poll()
        page = await visit(here.port)
        await shown(page, "[data-tile=growth]", "full in")
        await page.wait_for_selector('[data-tile=growth][data-level="warn"]')


async def test_the_charts_begin_with_the_whole_hour(visit):
    async with beside(poll_seconds=20.0, history_seconds=86_400) as here:
        an_hour(here.history, here.fake, here.clock, Story(here.history, here.fake))
        await here.sidecar.poll()
        page = await visit(here.port)
        drawn = await page.evaluate(DRAWN)
        kinds = {"requests", "request-rate", "encoder-cache", "reserved", "used", "host", "kv-usage"}
        assert {kind for kind, _ in drawn} == kinds
        for kind, (first, last) in drawn:
            assert last - first > 3500, kind


async def test_a_history_that_comes_late_is_drawn_from_its_beginning(visit):
    async with beside(poll_seconds=20.0, history_seconds=86_400) as here:
        an_hour(here.history, here.fake, here.clock, Story(here.history, here.fake))
        await here.sidecar.poll()
        page = await visit(here.port)
        answered = asyncio.Event()

        async def late(route: Any) -> None:
            await answered.wait()
            await route.continue_()

        await page.route("**/memory/history*", late)
        await page.reload()
        await page.locator("[data-plot=stack] canvas").first.wait_for()
        assert await page.locator("body[data-ready]").count() == 0
        answered.set()
        await page.wait_for_selector("body[data-ready]")
        first, *_, last = await page.evaluate(GIVEN)
        assert last - first > 3500


class EngineWithHelpers(HostReader):
    """Reads host memory of an engine, three of whose processes have one name."""

    def read(self) -> HostReading:
        given = host_reading()
        helper = ProcessMemory(role="other", name="other python3", pid=1, container="c", threads=2)
        three = [
            replace(helper, name=f"other python3 (pid {pid})", pid=pid, anonymous_bytes=pid * MIB, peak_bytes=pid * GIB)
            for pid in (100, 400, 250)
        ]
        return replace(given, processes=(*given.processes, *three))


async def test_the_chart_of_the_containers_memory_begins_with_the_whole_hour(visit):
    async with beside(poll_seconds=20.0, history_seconds=86_400) as here:
        host = here.sidecar.app.services.host
        host._reader, host.now = EngineWithHelpers(None), None
        while host.kept_bytes() is None:  # what the reader before had begun may end last
            host.now = None
            await host.read()
        an_hour(here.history, here.fake, here.clock, Story(here.history, here.fake))
        await here.sidecar.poll()
        page = await visit(here.port)
        times, kept = await page.evaluate(KEPT)
        known = [at for at, value in zip(times, kept, strict=True) if value is not None]
        assert known[-1] - known[0] > 3500
        row = page.locator("#host tr", has_text="other python3 x 3").filter(has_text="largest")
        await row.wait_for()  # host memory is asked for on its own
        cells = [text.strip() for text in await row.locator("th, td").all_inner_texts()]
        own = "750 MiB, largest 400 MiB"
        assert cells == ["other python3 x 3", UNKNOWN, own, UNKNOWN, UNKNOWN, "400.0 GiB", "6", UNKNOWN]
        assert (
            await page.locator("#host tr", has_text="other python3").count() == 2
        )  # of the parts, and of the processes


async def test_what_is_empty_takes_no_room(visit):
    def text_model(fake: FakeEngine) -> None:
        for worker in fake.workers:
            told = worker.memory
            worker.memory = lambda now, told=told: told(now) | {"encoder_cache": None}

    async with beside(text_model) as here:
        page = await visit(here.port)
        await page.locator("#events").wait_for()
        for panel in ("#resets", "#incidents", "#encoder", "[data-plot=encoder-cache]"):
            assert not await page.locator(panel).is_visible(), panel
        assert (await page.locator(".columns").nth(0).bounding_box())["height"] > 0
        assert await page.get_by_role("heading", name="Last resets").count() == 0
        await page.click("#reset_prefix_cache")
        await page.locator("#resets tbody tr").first.wait_for()
    async with beside() as here:
        await (await visit(here.port)).locator("#encoder").wait_for()


async def test_before_any_engine_there_is_no_empty_panel(visit):
    async with beside(engine_port=free_port()) as here:
        page = await visit(here.port)
        assert not await page.locator("#line-charts").is_visible()
        for panel in await page.locator(".panel").all():
            box = await panel.bounding_box()
            assert box is None or await panel.locator(":scope > :not(.panel-head)").first.is_visible()


# --- what an operator does ---


async def test_a_reset_by_its_button_shows_what_it_freed(visit):
    """As an annotation on each rank's chart, in the table, and as the answer; the same number everywhere."""
    async with beside() as here:
        here.fake.serve_images()
        await here.sidecar.poll()
        page = await visit(here.port)
        await page.click("#reset_encoder_cache")
        await shown(page, ".result", "PyTorch's allocator keeps 7.39 GiB of that")
        await shown(page, ".result[data-level=quiet]", "it gave no device memory back")
        await page.locator("#resets .tag[data-level=quiet]", has_text="done").wait_for()
        await page.locator("#events .tag[data-level=quiet]", has_text="reset").wait_for()
        await page.click("#reclaim")
        await shown(page, ".result", f"Gave back {2 * (CACHED + IMAGES * IMAGE_BYTES) / GIB:.2f} GiB")
        events = (await here.sidecar.client.get("/memory/events")).json()["events"]
        freed = [event["result"]["credited_bytes"] for event in events if event["kind"] == "reset"]
        assert freed == [0, 2 * (CACHED + IMAGES * IMAGE_BYTES), 0]
        for bytes_ in freed:
            await page.locator(f'#resets .freed[data-bytes="{bytes_}"]').first.wait_for()
        await page.locator("#rank-charts").scroll_into_view_if_needed()  # what is not seen is not drawn
        for rank in (0, 1):
            notes = page.locator(f'[data-rank="0:{rank}"] .note[data-kind=reset]')
            await notes.filter(has_text=f"release {MINUS}{(CACHED + IMAGES * IMAGE_BYTES) / GIB:.2f} GiB").wait_for(
                state="attached"
            )
            await notes.filter(has_text="encoder cache \N{PLUS-MINUS SIGN}0").first.wait_for(state="attached")
        await page.locator("#resets .tag[data-level=good]", has_text="done").wait_for()
        assert await number(page, "last") == max(freed)  # not the last act: the last that gave something


async def test_a_mark_is_on_every_chart(visit):
    async with beside() as here:
        page = await visit(here.port)
        await page.fill("#mark-name", "after bench")
        await page.press("#mark-name", "Enter")
        await shown(page, ".result", "Marked “after bench”")
        await page.locator("#rank-charts").scroll_into_view_if_needed()
        for rank in (0, 1):
            await shown(page, f'[data-rank="0:{rank}"] .note[data-kind=mark]', "after bench")
        assert list(here.history.marks) == ["after bench"]


async def test_reclaim_asks_first_what_it_would_do(visit):
    async with beside() as here:
        here.fake.serve_images()
        await here.sidecar.poll()
        page = await visit(here.port)
        await page.click("#dry-run")
        await shown(page, ".result", "would run")
        assert done(here.fake) == []
        await page.click("#reclaim")
        await shown(page, ".result", "less in use now: encoder cache 7.39 GiB")
        assert "release" in done(here.fake)


async def test_a_refusal_says_why(visit):
    """`reset_mm_cache` can hang vLLM before 0.25: it is refused, with the reason, and nothing is done."""
    async with beside(engine={"version": "0.23.0"}) as here:
        page = await visit(here.port)
        await page.click("#reset_mm_cache")
        await shown(page, ".result[data-level=bad]", "0.25")
        assert done(here.fake) == []


async def test_now_asks_before_it_harms(visit):
    async with beside() as here:
        page = await visit(here.port)
        await page.select_option("#mode", "now")
        await page.click("#reset_prefix_cache")
        await shown(page, "#confirm-text", "does not wait")
        await page.press("body", "Escape")
        assert done(here.fake) == []
        await page.click("#reset_prefix_cache")
        await page.click("#confirm-form [type=submit]")
        await shown(page, ".result", "reset prefix cache")
        assert done(here.fake) == ["/reset_prefix_cache"]


# --- who may ---


async def test_the_token_is_asked_for_and_kept_nowhere(visit):
    async with beside(admin_token=TOKEN) as here:
        page = await visit(here.port)
        await page.fill("#mark-name", "mine")
        await page.press("#mark-name", "Enter")
        await page.fill("#token-input", "not-the-token")
        await page.press("#token-input", "Enter")
        await shown(page, "#token-problem", "does not accept this token")
        await page.fill("#token-input", TOKEN)
        await page.press("#token-input", "Enter")
        await shown(page, ".result", "Marked “mine”")
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        assert TOKEN not in await page.evaluate(kept)
        assert await page.input_value("#token-input") == ""
        await page.reload()
        await page.wait_for_selector("body[data-ready]")
        assert await page.inner_text("#token-button") == "Admin token"


async def test_a_token_that_is_not_given_does_nothing(visit):
    """The dialog can be left, and the page says what it needs; forgetting a token is as good as none."""
    async with beside(admin_token=TOKEN) as here:
        page = await visit(here.port)
        await page.click("#reclaim")
        await page.click("#token-cancel")
        await shown(page, ".result", "needs the admin token")
        await page.click("#token-button")
        await page.fill("#token-input", TOKEN)
        await page.press("#token-input", "Enter")
        await shown(page, "#token-button", "Token in use")
        await page.click("#token-button")
        await page.click("#token-forget")
        await shown(page, "#token-button", "Admin token")
        assert done(here.fake) == []


async def test_from_elsewhere_the_token_is_asked_for(visit):
    async with beside() as here:
        page = await visit(here.port, host=ELSEWHERE)
        await page.click("#reset_encoder_cache")
        await shown(page, "#token-why", "highwater token")
        await page.click("#token-cancel")
        await shown(page, ".result", "highwater token --port 8001")
        assert done(here.fake) == []


async def test_a_sidecar_without_a_token_says_what_to_set(visit, tmp_path):
    """Its file can be read by others: nothing is let in, and the page tells what to do."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    async with beside(admin_token_file=tmp_path / "token") as here:
        page = await visit(here.port)
        await page.click("#reset_encoder_cache")
        await shown(page, ".result[data-level=bad]", "The sidecar has no admin token")
        await shown(page, ".result[data-level=bad]", "its log says why and what to change")
        assert done(here.fake) == []


async def test_the_entries_are_asked_for_with_the_token(visit):
    async with beside(admin_token=TOKEN) as here:
        here.fake.serve_images(3)
        await here.sidecar.poll()
        asked = here.fake.ops().count("encoder_cache")
        page = await visit(here.port)
        await page.locator("#encoder").scroll_into_view_if_needed()
        await page.click("#encoder button")
        await shown(page, "#encoder .empty", "The entries are not known")
        assert here.fake.ops().count("encoder_cache") == asked
        await page.click("#token-button")
        await page.fill("#token-input", TOKEN)
        await page.press("#token-input", "Enter")
        await page.click("#encoder button")
        await page.locator("#encoder tbody code").first.wait_for()
        title = await page.locator("#encoder tbody code").first.get_attribute("title")
        assert title in {entry["mm_hash"] for entry in here.fake.workers[0].encoder_cache(0.0)["entries"]}
        assert here.fake.ops().count("encoder_cache") == asked + 1
        await page.fill("#mark-name", "mine")
        await page.press("#mark-name", "Enter")
        await shown(page, "#events li", "127.0.0.1, with the token")


async def test_names_are_text_wherever_they_come_from(visit):
    def hostile(fake: FakeEngine) -> None:
        fake.model = HOSTILE
        for worker in fake.workers:
            worker.device = lambda: {"type": HOSTILE, "index": 0, "name": HOSTILE}
            worker.entries = {HOSTILE: IMAGE_BYTES}

    async with beside(hostile) as here:
        await here.sidecar.client.post("/memory/marks", json={"name": HOSTILE})
        page = await visit(here.port)
        await shown(page, "#model", HOSTILE)
        await shown(page, "#events", HOSTILE)
        await shown(page, "#rank-table", HOSTILE)
        await page.locator("#encoder").scroll_into_view_if_needed()
        await page.click("#encoder button")
        assert await page.locator("#encoder tbody code").first.get_attribute("title") == HOSTILE
        assert await page.evaluate("window.pwned") is None
        assert await page.locator("img, main script").count() == 0


# --- when something is the matter ---


async def test_an_engine_that_is_gone_is_told_with_what_to_do(visit):
    """The last figures stay, as what they are: old."""
    async with beside() as here:
        page = await visit(here.port)
        here.fake.down = True
        for _ in range(2):  # one refused connection may be an accident
            await here.sidecar.poll()
        await shown(page, "[data-notice=engine]", "nothing answers any more")
        await shown(page, "#connection", "stale")
        assert await page.inner_text("#engine-state") == "engine is gone"
        assert await page.evaluate("document.body.classList.contains('old')")


async def test_an_engine_that_was_stopped_is_no_failure(visit):
    async with beside() as here:
        page = await visit(here.port)
        here.fake.down = True
        for _ in range(2):
            await here.sidecar.poll()
        here.sidecar.app.services.poller.note_stop()
        await here.sidecar.poll()
        await shown(page, "[data-notice=engine]", "The engine was stopped in order")
        assert await page.inner_text("#engine-state") == "engine stopped in order"
        assert await page.get_attribute("#engine-state", "data-level") == "warn"
        await shown(page, "[data-notice=engine]", "stopped in order at ")
        assert (await page.title()).startswith("stopped in order")


async def test_workers_that_nothing_shows_are_not_missing(visit):
    async with beside(engine={"extension": None}) as here:
        page = await visit(here.port)
        await page.evaluate(
            """async () => {
            const { state, takeReport } = (await import("./dashboard/main.js")).inspect;
            const lost = { dp_rank: 0, pp_rank: 0, tp_rank: 0, status: "never seen" };
            takeReport({ ...state.report, ranks_expected: 1, ranks_missing: [lost] });
            }"""
        )
        await shown(page, "[data-notice=ranks]", "The workers cannot be read")


async def test_a_list_that_was_not_asked_again_says_of_when_it_is(visit):
    async with beside() as here:
        page = await visit(here.port)
        await page.locator("#encoder").scroll_into_view_if_needed()
        await page.click("#encoder button")
        await shown(page, "#encoder .empty", "The cache was empty at ")
        await page.evaluate(
            """async () => {
            const { state, takeReport } = (await import("./dashboard/main.js")).inspect;
            const engine = { ...state.report.engine, state: "busy" };
            takeReport({ ...state.report, engine, encoder_cache: { ...state.report.encoder_cache, entries: 8 } });
            }"""
        )
        await shown(page, "#encoder .note-line", "list not read since ")


async def test_links_to_incidents_end_with_the_sidecar_that_had_them(visit):
    async with beside() as here:
        page = await visit(here.port)
        await page.evaluate(
            """async () => {
            const { state, takeReport } = (await import("./dashboard/main.js")).inspect;
            const at = Date.now() / 1000;
            state.incidents = { incidents: [{ id: "x", kind: "died", at, last_at: at, summary: "it died" }] };
            takeReport({ ...state.report });
            }"""
        )
        await shown(page, "[data-notice=incident]", "it died")
        await page.evaluate(
            """async () => {
            const { state, takeReport } = (await import("./dashboard/main.js")).inspect;
            takeReport({ ...state.report, sidecar_started_at: state.report.sidecar_started_at + 60 });
            }"""
        )
        await page.locator("[data-notice=incident]").wait_for(state="detached")


async def test_without_any_engine_it_says_so(visit):
    async with beside(engine_port=free_port()) as here:
        page = await visit(here.port)
        await shown(page, "[data-notice=engine]", "nothing answers yet")
        assert await page.inner_text("[data-tile=used] .tile-number") == UNKNOWN
        assert await page.inner_text("#rank-charts") == "No rank has been read yet."
        for tile in ("used", "headroom", "growth", "encoder", "reserved", "host"):
            assert await page.inner_text(f"[data-tile={tile}] .tile-sub") == "nothing read yet"


async def test_without_the_extension_it_says_how_to_load_it(visit):
    async with beside(engine={"extension": None}) as here:
        page = await visit(here.port)
        await shown(page, "[data-notice=hint]", "--worker-extension-cls")


async def test_missing_ranks_are_named(visit):
    async with beside(engine={"data_parallel": 2}) as here:
        page = await visit(here.port)
        missing = (await here.memory())["ranks_missing"]
        assert missing
        await shown(page, "[data-notice=ranks]", f"dp {missing[0]['dp_rank']}")


async def silenced(here: Any, page: Any) -> None:
    """Let the sidecar be out of this page's reach."""
    await page.route("**/memory/events*", lambda route: route.abort())
    here.history.close()
    await page.locator("body.lost").wait_for()


async def favicon(page: Any) -> str:
    href = await page.get_attribute("link[rel=icon]", "href")
    assert (await page.request.get(f"{page.url.rsplit('/', 1)[0]}/{href}")).ok
    return href


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
async def test_out_of_the_sidecars_reach_nothing_looks_alive(visit, scheme, width):
    """No green, and beside every title since when; in the tab too. All of it ends when the sidecar is there again."""
    async with beside(policy=PolicySettings(mode="observe")) as here:
        an_hour(here.history, here.fake, here.clock, Story(here.history, here.fake))
        here.fake.workers[1].non_torch += 5 * GIB
        await here.sidecar.poll()
        page = await visit(here.port, color_scheme=scheme, viewport={"width": width, "height": 900})
        titles, icon = await page.title(), await favicon(page)
        await page.locator("[data-notice=shortage] li").first.wait_for()
        await silenced(here, page)
        await shown(page, "#engine-state[data-level=quiet]", "engine ready, last known ")
        since = (await page.inner_text("#engine-state")).removeprefix("engine ready, ")
        heads = page.locator(".panel-head h2:visible, .tile h2")
        assert await heads.count() > 12
        assert [text for text in await heads.all_inner_texts() if not text.endswith(since)] == []
        assert await page.title() == f"no connection · {titles}"
        assert await favicon(page) != icon
        good = await page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--good')")
        shades = "all => all.map((one) => getComputedStyle(one).getPropertyValue('--good'))"
        assert good not in await page.locator("main > :not(#notices)").evaluate_all(shades)
        assert violations(await Axe().run(page)) == []
        await page.unroute("**/memory/events*")
        await page.locator("body:not(.lost)").wait_for()
        assert (await page.title(), await favicon(page)) == (titles, icon)
        assert await page.locator(".as-of", has_text="last known").count() == 0
        await shown(page, "#engine-state[data-level=good]", "engine ready")


async def test_a_silent_connection_is_a_lost_one(visit):
    """Nothing is refused and nothing comes: a sidecar that stands still, or a cable that was pulled."""
    async with beside() as here:
        page = await visit(here.port, clock=True)
        await page.route("**/memory/events*", lambda route: route.abort())
        await page.clock.fast_forward(21_000)
        await shown(page, "[data-notice=connection]", "tries again by itself")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_old_figures_can_be_read(visit, scheme):
    async with beside() as here:
        page = await visit(here.port, color_scheme=scheme)
        here.fake.down = True
        for _ in range(2):
            await here.sidecar.poll()
        await page.locator("body.old").wait_for()
        assert violations(await Axe().run(page)) == []


async def test_a_page_says_since_when_its_sidecar_knows_anything(visit):
    async with beside(policy=PolicySettings()) as here:
        page = await visit(here.port)
        await shown(page, "#events li", "sidecar started: it knows nothing of what was before")
        await shown(page, "#policy", "0 actions since the sidecar started at")
        at = await page.locator("#events li", has_text="sidecar started").locator("time").inner_text()
        await shown(page, "[data-tile=last]", f"nothing since {at}")
        await shown(page, "#policy .empty", f"None since {at}.")
        assert await page.locator("[data-notice=restarted]").count() == 0
        await shown(page, ".note[data-kind=sidecar]", "sidecar")


async def test_an_incident_leads_back_to_the_page(visit, tmp_path):
    async with beside(incidents={"folder": tmp_path}) as here:
        await here.sidecar.app.services.incidents.open_incident(evidence("died", rank(reading(0))))
        page = await visit(here.port)
        await page.locator("#incidents a").first.click()
        await page.get_by_role("link", name="Back to the dashboard").click()
        await page.wait_for_selector("body[data-ready]")


async def test_it_finds_a_restarted_sidecar_again(visit, tmp_path):
    fake = FakeEngine()
    async with serving(fake) as port:
        url = f"http://127.0.0.1:{port}"
        first = await asyncio.to_thread(DemoSidecar(url, folder=tmp_path).start)
        try:
            page = await visit(first.port)
            await page.wait_for_selector('[data-tile=used] .tile-number:not([data-bytes="unknown"])')
            await asyncio.to_thread(first.stop)
            await shown(page, "[data-notice=connection]", "tries again by itself")
            fake.serve_images(2)
            second = DemoSidecar(url, folder=tmp_path, port=first.port)
            await asyncio.to_thread(second.start)
            try:
                used = str(fake.workers[0].used)
                await page.wait_for_selector(f'[data-tile=used] [data-bytes="{used}"]')
                await shown(page, "#connection", "live")
                assert await page.locator("[data-notice=connection]").count() == 0
                started = (await asyncio.to_thread(second.call, "GET", "/memory"))["sidecar_started_at"]
                at = await page.evaluate("at => new Date(at * 1000).toTimeString().slice(0, 8)", started)
                await shown(page, "[data-notice=restarted]", f"restarted at {at}: what it knew before is lost")
                await shown(page, "#events li", "sidecar restarted: what it knew before is lost")
                await shown(page, ".note[data-kind=sidecar]", "sidecar")
                await shown(page, "[data-tile=policy]", f"since the sidecar started at {at}")
            finally:
                await asyncio.to_thread(second.stop)
        finally:
            await asyncio.to_thread(first.stop)


# --- the policy ---


async def test_a_shortage_is_told_with_what_is_missing_where(visit):
    async with beside(policy=PolicySettings(mode="observe")) as here:
        page = await visit(here.port)
        assert await page.locator("[data-notice=shortage]").count() == 0
        await shown(page, "[data-tile=policy]", "calm")
        here.fake.workers[1].cached = 0
        here.fake.workers[1].non_torch += CACHED + 6400 * MIB
        await here.sidecar.poll()
        (rule,) = (await here.memory())["policy"]["rules"]
        assert rule["ranks"][1]["short_bytes"] > 0
        missing = f"{rule['ranks'][1]['short_bytes'] / GIB:.2f} GiB missing"
        await shown(page, "[data-notice=shortage]", "Memory is short")
        await shown(page, "[data-notice=shortage] li", missing)
        assert await page.locator("[data-notice=shortage] li").count() == 1
        await shown(page, "[data-tile=headroom]", missing)
        await shown(page, "[data-tile=policy]", "short by")
        await shown(page, "#policy .pill[data-level=warn]", "short")
        cells = page.locator("#policy tbody tr").filter(has=page.get_by_role("rowheader", name="rank 1")).locator("td")
        assert f"{rule['ranks'][1]['short_bytes'] / GIB:.2f}" in await cells.all_inner_texts()


async def test_a_figure_that_moves_is_no_new_notice(visit):
    async with beside(policy=PolicySettings(mode="observe")) as here:
        here.fake.workers[0].non_torch += 6400 * MIB
        await here.sidecar.poll()
        page = await visit(here.port)
        notice = page.locator("[data-notice=shortage]")
        await notice.evaluate("element => { window.announced = element }")
        before = await notice.inner_text()
        here.fake.workers[0].non_torch += 40 * MIB
        await here.sidecar.poll()
        await page.wait_for_function("before => window.announced.innerText !== before", arg=before)
        assert await page.evaluate("window.announced.isConnected")
        assert await notice.locator("p").get_attribute("aria-live") == "off"


async def test_each_ranks_waters_are_lines_in_its_own_chart(visit):
    def holds_more_at_rest(fake: FakeEngine) -> None:
        fake.workers[1].cached, fake.workers[1].non_torch = 0, 6000 * MIB

    async with beside(holds_more_at_rest, policy=PolicySettings()) as here:
        page = await visit(here.port)
        await page.locator("#rank-charts").scroll_into_view_if_needed()
        ranks = (await here.memory())["policy"]["rules"][0]["ranks"]
        assert ranks[0]["high_free_bytes"] != ranks[1]["high_free_bytes"]
        for rank in ranks:
            drawn = await page.evaluate(WATERS, f"0:{rank['rank']}")
            lines = {"--high": rank["high_free_bytes"], "--low": rank["low_free_bytes"]}
            assert drawn == {name: pytest.approx((TOTAL - free) / GIB) for name, free in lines.items()}
        await shown(page, "#legend", "high water, each rank its own")
        described = await page.get_by_role("img").filter(has=page.locator("canvas")).first.get_attribute("aria-label")
        assert f"High water {ranks[0]['high_free_bytes'] / GIB:.2f} GiB free" in described


async def test_a_rule_that_cannot_act_is_told_with_the_reason(visit):
    """Its waters cannot be reached: nothing that it could do would ever be enough."""
    tight = Rule(name="tight", signal="device_used_ratio", high_water=0.5, low_water=0.4)
    async with beside(policy=PolicySettings(rules=(tight,))) as here:
        page = await visit(here.port)
        await shown(page, "[data-notice=rule]", "Rule tight cannot act")
        await shown(page, "[data-notice=rule]", "cannot be reached")
        await shown(page, "[data-tile=policy]", "a rule cannot act")


async def test_whatever_the_policy_says_is_text(visit):
    async with beside(policy=PolicySettings(mode="observe")) as here:
        here.fake.workers[0].non_torch += 6400 * MIB
        await here.sidecar.poll()
        page = await visit(here.port)
        told = await here.memory()
        policy = told["policy"] | {"summary": HOSTILE}
        (rule,) = policy["rules"]
        rule |= {"name": HOSTILE, "signal": HOSTILE, "reason": HOSTILE}
        rule["ranks"][0] |= {"note": HOSTILE}
        rule["remedies"][0] |= {"name": HOSTILE, "unavailable": HOSTILE, "last_reason": HOSTILE}
        take = "async report => (await import('./dashboard/main.js')).inspect.takeReport(report)"
        await page.evaluate(take, told | {"policy": policy})
        await shown(page, "[data-notice=shortage] p", HOSTILE)
        await shown(page, "#policy td", HOSTILE)
        assert await page.evaluate("window.pwned") is None
        assert await page.locator("img, main script").count() == 0


# --- foreveryone ---


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
async def test_nothing_is_in_anyones_way(visit, scheme, width):
    async with beside(admin_token=TOKEN, policy=PolicySettings(mode="observe")) as here:
        an_hour(here.history, here.fake, here.clock, Story(here.history, here.fake))
        here.fake.workers[1].non_torch += 5 * GIB  # so that a notice and the policy's tables are there
        await here.sidecar.poll()
        page = await visit(here.port, color_scheme=scheme, viewport={"width": width, "height": 900})
        await page.locator("#resets tbody tr").first.wait_for()
        await page.locator("[data-notice=shortage] li").first.wait_for()
        await page.get_by_text("As a table").first.click()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert violations(await Axe().run(page)) == []
        await page.click("#token-button")
        assert violations(await Axe().run(page)) == []


def violations(results: Any) -> list[str]:
    return [f"{found['id']}: {found['nodes'][0]['html']}" for found in results.response["violations"]]


async def test_the_colours_are_the_systems_until_chosen(visit):
    async with beside() as here:
        page = await visit(here.port, color_scheme="dark")
        background = "getComputedStyle(document.body).backgroundColor"
        dark = await page.evaluate(background)
        await page.click("#theme-button")
        light = await page.evaluate(background)
        await page.reload()
        assert await page.evaluate(background) == light != dark


# --- an hour of eight ranks (measure.py tells the figures) ---


async def test_eight_ranks_and_an_hour_are_there_at_once(visit):
    async with an_hour_of_eight() as here:
        page = await visit(here.port)
        painted = await times_to_paint(page)
        assert painted["first contentful paint"] < 20_000
        assert await page.locator("#rank-table tbody tr").count() == 9


async def test_memory_stays_flat(visit):
    """As many readings as in an hour and more leave nothing behind but the ring that they are kept in."""
    async with beside(engine={"tensor_parallel": 8}) as here:
        page = await visit(here.port)
        report = await here.memory()
        await flood(page, report, RING)
        before = await heap_bytes(page)
        await flood(page, report, RING)
        assert await heap_bytes(page) < before + 4 * 2**20
        assert before < 60 * 2**20


async def test_the_budget_is_drawn_with_its_line(visit):
    def tell(fake: FakeEngine) -> None:
        fake.budget = wire(story(), version="0.12.0")

    async with beside(tell) as running:
        page = await visit(running.port)
        bar = page.locator("#budget .budget-bar")
        await bar.wait_for()
        label = await bar.get_attribute("aria-label")
        pieces = bar.locator("[data-part]")
        widths = await pieces.evaluate_all("all => all.map((one) => [one.dataset.part, one.offsetWidth])")
        line = await bar.locator(".budget-line").evaluate("one => one.offsetLeft / one.parentElement.offsetWidth")
        assert "KV cache" in label
        assert dict(widths)["kv_cache"] > dict(widths)["weights"] > dict(widths)["non_torch"] > 0
        assert line == pytest.approx(0.95, abs=0.01)
        await shown(page, "#budget .budget-words", "645,120 tokens")
        await shown(page, "#budget .budget-tables", "peak activation")
        null_block = page.locator("#budget tr", has_text="null block")
        assert "9 MiB" in await null_block.inner_text()
        await page.set_viewport_size({"width": 420, "height": 800})
        tables = page.locator("#budget .budget-tables > .scroll")
        hidden = await tables.evaluate_all("all => all.map((one) => one.scrollWidth - one.clientWidth)")
        assert hidden == [0, 0]  # words wrap: no column is out of sight
        results = await Axe().run(page)
        assert [found["id"] for found in results.response["violations"]] == []


async def test_without_a_start_the_budget_takes_no_room(visit):
    async with beside() as running:
        page = await visit(running.port)
        assert await page.locator("#budget").is_hidden()
