"""What a recording is made of: the readings kept, the files written, the command found and shown."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from highwater.process.errors import SidecarUnreachable
from highwater.terminal.client import ranks_of, remedy_of
from highwater.terminal.measure import sampler as kept
from highwater.terminal.measure.load import LoadNotStarted, find, masked, shell_code, shown_command
from highwater.terminal.measure.recording import Measurement
from highwater.terminal.measure.report import CannotWriteReport, ReportFiles
from highwater.terminal.measure.sampler import Series, cache_of, peaks, settings_of, usual_gap
from tests.fakes.engine import IMAGES, FakeEngine
from tests.unit.terminal.measure.story import MIB, START, moment, point, story

NOW = 1_763_660_000.0


# --- readings ---


def test_readings_are_validated_where_they_enter():
    for ask, answer in ((ranks_of, [{"rank": 0}]), (remedy_of, {}), (remedy_of, {"outcome": 1})):
        with pytest.raises(SidecarUnreachable, match="is not what a sidecar of this version answers"):
            ask(answer)


def test_the_fullest_ranks_encoder_cache_is_told():
    worker = FakeEngine().workers[0]
    worker.entries = {f"{number:064x}": MIB for number in range(IMAGES)}
    answer = {"ranks": [{"rank": 0, "dp_rank": 0, **worker.encoder_cache(NOW)}]}
    snapshot = cache_of("now", answer, moment("after", "", NOW))
    assert (snapshot.totals.entries, snapshot.totals.device_bytes, snapshot.totals.capacity_embeds) == (
        IMAGES,
        IMAGES * MIB,
        16_384,
    )
    assert (len(snapshot.largest), snapshot.largest[0].embeds) == (5, 256)
    assert cache_of("now", {"ranks": [{"present": False}]}, moment("after", "", NOW)) is None


def test_settings_go_by_their_flags():
    config = {
        "cache_config": {"gpu_memory_utilization": 0.9},
        "model_config": {
            "max_model_len": 4096,
            "quantization": None,
            "multimodal_config": {"mm_processor_cache_gb": 4},
        },
    }
    told = settings_of({"vllm_config": config})
    assert told == {
        "--gpu-memory-utilization": "0.9",
        "--max-model-len": "4096",
        "--mm-processor-cache-gb": "4",
    }
    assert settings_of({"vllm_config": "model='...', as text"}) == settings_of(None) == {}


def test_at_its_peak_a_rank_that_came_under_the_load_has_its_total():
    sampler = SimpleNamespace(series=Series(), traffic=(), events=(), recorded=True)
    sampler.series.add([point(1, START + 1)])
    sidecar, before = SimpleNamespace(url="http://sidecar"), SimpleNamespace(ranks=[point(0, START)], engine=None)
    before.policy = None
    measured = Measurement("m", ("true",), (), 0.0, sidecar, sidecar, interrupts=None, say=print, _started_at=START)
    experiment = measured._experiment(before, sampler, SimpleNamespace(code=0, seconds=5.0))
    assert experiment.moment("peak").rank((0, 1)).total_bytes == point(1, START).total_bytes > 0


# --- the series ---


def test_of_too_many_readings_the_peak_stays(monkeypatch):
    monkeypatch.setattr(kept, "MAX_POINTS", 64)
    series = Series()
    for second in range(1000):
        series.add([point(0, START + second, encoder=500 * MIB if second == 137 else 0)])
    (points,) = series.points().values()
    assert len(points) <= 65
    assert series.last_at() == {(0, 0): START + 999}
    assert peaks(points)[0, 0].components.encoder_cache_bytes == 500 * MIB
    assert series.gaps == []


def test_what_comes_twice_is_kept_once():
    series = Series()
    series.add([point(0, START), point(0, START + 1)])
    series.add([point(0, START + 1), point(0, START + 2)])
    assert [each.taken_at - START for each in series.points()[0, 0]] == [0, 1, 2]


def test_gaps_are_found_also_at_the_end():
    series = Series(gap_seconds=10)
    series.add([point(0, START + second) for second in (-100, 0, 5, 30, 31)])
    assert [(gap.start - START, gap.seconds) for gap in series.gaps_within(START, START + 50)] == [(5, 25), (31, 19)]


@pytest.mark.parametrize(("pauses", "seconds"), [((), 15), ((1, 1, 1), 15), ((60, 60), 180)])
def test_how_often_the_sidecar_reads_tells_what_a_gap_is(pauses, seconds):
    moments = [START]
    for pause in pauses:
        moments.append(moments[-1] + pause)
    assert usual_gap(moments) == seconds


def test_the_peak_is_of_the_load():
    low, high, other = point(0, START, encoder=MIB), point(0, START + 5, encoder=2 * MIB), point(1, START)
    assert peaks([low, high, other]) == {(0, 0): high, (0, 1): other}
    load = story().load
    assert [load.lasted(at) for at in (START - 1, START, load.ended_at, load.ended_at + 1)] == [0, 1, 1, 0]


# --- files ---


@pytest.mark.parametrize("name", ["out", "out.html", "out.md"])
def test_both_files_go_by_one_name(tmp_path, name):
    files = ReportFiles(tmp_path / name, force=False, now=NOW)
    files.write({".html": "<p>", ".md": "# x"})
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"out.html": "<p>", "out.md": "# x"}


def test_a_name_is_made_where_none_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [path.name for path in ReportFiles(None, force=False, now=NOW).paths]
    assert names == ["highwater-20251120-173320Z.html", "highwater-20251120-173320Z.md"]
    (tmp_path / "sub").mkdir()
    assert ReportFiles(tmp_path / "sub", force=False, now=NOW).paths[0].parent == tmp_path / "sub"


@pytest.mark.parametrize("there", ["out.html", "out.md"])
def test_a_file_that_is_there_is_never_replaced_unasked(tmp_path, there):
    (tmp_path / there).write_text("old")
    with pytest.raises(CannotWriteReport, match="is there already; --force replaces it"):
        ReportFiles(tmp_path / "out", force=False, now=NOW)
    ReportFiles(tmp_path / "out", force=True, now=NOW).write({".html": "new", ".md": "new"})
    assert (tmp_path / there).read_text() == "new"


def test_a_file_that_came_meanwhile_stays(tmp_path):
    files = ReportFiles(tmp_path / "out", force=False, now=NOW)
    (tmp_path / "out.md").write_text("somebody's")
    _, written = files.write({".html": "new", ".md": "new"})
    assert (tmp_path / "out.md").read_text() == "somebody's"
    assert (written.name.startswith("out-20251120"), written.read_text()) == (True, "new")


@pytest.mark.parametrize("out", ["missing/out", "file/out", "folder", "x" * 300])
def test_where_nothing_can_be_written_is_told_at_once(tmp_path, out):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(CannotWriteReport):
        ReportFiles(tmp_path / out, force=False, now=NOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html"]


# --- the command ---


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("bench --api-key sk-abc --num 3", "bench --api-key *** --num 3"),
        ("bench --api-key=sk-abc", "bench --api-key=***"),
        ("env OPENAI_API_KEY=abc HF_TOKEN=x bench", "env OPENAI_API_KEY=*** HF_TOKEN=*** bench"),
        (
            "curl -H 'Authorization: Bearer abc' http://u:p@host/",
            "curl -H 'Authorization: Bearer ***' http://***@host/",
        ),
        ("sh -c 'TOKEN=abc bench --seed 1'", "sh -c 'TOKEN=*** bench --seed 1'"),
        ("bench --max-tokens 5 --tokenizer m --max-num-batched-tokens 8", None),
        ("bench --extra-body '{\"max_tokens\": 5}'", None),
        ("bench --password", None),
        ("bench '--password=two words' --x", "bench '--password=***' --x"),
        ('bench --header \'{"api_key": "abc", "n": 1}\'', 'bench --header \'{"api_key": "***", "n": 1}\''),
    ],
)
def test_secrets_are_masked_and_nothing_else(command, shown):
    assert shown_command(masked(shlex.split(command))) == shlex.join(shlex.split(shown or command))


def test_a_program_is_looked_for_before_the_load(tmp_path):
    (tmp_path / "plain").write_text("")
    for name, code in (("no-such-program", 127), (str(tmp_path / "plain"), 126), (str(tmp_path), 126)):
        with pytest.raises(LoadNotStarted) as caught:
            find([name])
        assert caught.value.exit_code == code
    assert find(["true"]).endswith("true")


@pytest.mark.parametrize(
    ("code", "told"), [(0, (0, None)), (3, (3, None)), (-15, (143, "SIGTERM")), (-40, (168, None))]
)
def test_codes_are_told_as_a_shell_tells_them(code, told):
    number, name = shell_code(code)
    assert number == told[0]
    assert told[1] is None or name == told[1]
