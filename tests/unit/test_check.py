"""The check's own promises: a failed lane fails it, no test is left out unseen, and long tests run when in doubt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import check, topics
from tests.check import Lane, all_lanes, changed, files_in_no_lane, long_topics, not_run, program, run
from tests.imports import imported_by
from tests.topics import ROOT, TOPICS, Topic, digests, marked

SLOTS = 2
# A pytest of its own loads the plugins that its test names, and no other package's: most of its start is theirs.
BARE = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
SIDE_BY_SIDE = ("-p", "xdist", "--numprocesses", "2")
either_way = pytest.mark.parametrize("side_by_side", [(), SIDE_BY_SIDE], ids=["one process", "two workers"])


@pytest.fixture(autouse=True)
def logs(tmp_path, monkeypatch):
    """Nothing is written in the tree; what a lane says and sees is in this folder."""
    monkeypatch.setattr(check, "LOGS", tmp_path)
    return tmp_path


def lane(name: str, *script: str, **options) -> Lane:
    return Lane(name, tuple(("sh", "-c", text) for text in script), **options)


def statuses(*lanes: Lane) -> tuple[dict[str, int | None], list[str]]:
    ended, never_begun = run(lanes, SLOTS)
    return {one.lane.name: one.status for one in ended}, [lane.name for lane in never_begun]


# --- lanes ---


def test_every_lane_runs_and_a_failure_is_shown_whole(capsys):
    """Those after it run all the same, and what it wrote is on the screen."""
    found = statuses(lane("good", "true"), lane("bad", "echo the reason; exit 3"), lane("later", "true"))
    assert found == ({"good": 0, "bad": 3, "later": 0}, [])
    shown = capsys.readouterr().out
    assert "bad FAILED with status 3" in shown
    assert "the reason" in shown


def test_a_lanes_commands_end_with_the_first_that_fails(logs):
    """So no later one can make up for it."""
    assert statuses(lane("two", "exit 4", "echo reached"))[0] == {"two": 4}
    assert "reached" not in (logs / "two.log").read_text()


def test_a_lane_waits_for_those_before_it(logs):
    """And is not begun when one of them fails."""
    first = lane("first", f"echo first >> {logs}/order")
    second = lane("second", f"echo second >> {logs}/order", after=("first",))
    assert statuses(second, first) == ({"first": 0, "second": 0}, [])
    assert (logs / "order").read_text().split() == ["first", "second"]
    assert statuses(lane("bad", "false"), lane("after", "true", after=("bad",))) == ({"bad": 1}, ["after"])


def test_a_lane_does_not_run_beside_those_that_it_names(logs):
    """Whichever of the two begins first; lanes that neither names go on."""
    script = f"echo begin >> {logs}/order; sleep 0.3; echo end >> {logs}/order"
    first, second = lane("first", script), lane("second", script, not_beside=("first",))
    assert statuses(first, second) == ({"first": 0, "second": 0}, [])
    assert statuses(second, first) == ({"first": 0, "second": 0}, [])
    assert (logs / "order").read_text().split() == ["begin", "end"] * 4


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not share cores by session")
def test_a_lane_that_gives_way_does_so_as_a_session(logs):
    """The lanes of engines, which are the longest, have the cores first."""
    script = "print(open('/proc/self/autogroup').read())"
    gives_way = Lane("gives-way", (program("python", "-c", script),), session_gives_way=True)
    does_not = Lane("does-not", ((sys.executable, "-c", script),))
    assert statuses(gives_way, does_not) == ({"gives-way": 0, "does-not": 0}, [])
    assert (logs / "gives-way.log").read_text().split()[1:] == ["nice", "5"]
    assert (logs / "does-not.log").read_text().split()[1:] == ["nice", "0"]


def test_what_a_lane_costs_is_counted_with_its_children():
    """Processor time is what tells a slow check from a busy machine."""
    burn = "import time\nwhile time.process_time() < 0.2: pass"
    (one,), _ = run([Lane("burning", ((sys.executable, "-c", burn),))], SLOTS)
    assert one.cpu_seconds > 0.2


@pytest.mark.parametrize(
    ("wrote", "told"),
    [
        (".... [ 12%]\\n.... [ 57%]\\n..", "tests 57 %"),
        ("Installing vLLM: some minutes\\n....F.", "tests (Installing vLLM: some minutes)"),
        ("......", "tests"),
    ],
)
def test_progress_is_what_a_lane_said_last(wrote, told):
    """Pytest's count, or what takes so long before it."""
    (one,), _ = run([lane("tests", f"printf %b '{wrote}'")], SLOTS)
    assert one.progress() == told


# --- nothing left out ---


def test_every_test_file_is_in_one_lane():
    """As the tree is now."""
    assert files_in_no_lane(all_lanes()) == []


def test_a_test_file_in_no_lane_or_in_two_is_found(tmp_path):
    """A new folder must be given to a lane."""
    for folder in ("tests/new", "tests/known"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_it.py").touch()
    known = lane("known", folders=("tests/known",))
    assert files_in_no_lane([known], tmp_path) == ["tests/new/test_it.py"]
    both = ["tests/known/test_it.py", "tests/new/test_it.py"]
    assert files_in_no_lane([known, known], tmp_path) == both


def test_a_test_that_was_collected_and_did_not_run_is_found(logs):
    """Also a lane that wrote nothing down, and a file without a test in it."""
    (logs / "tests/known").mkdir(parents=True)
    (logs / "tests/known/test_empty.py").touch()
    known = lane("known", folders=("tests/known",))
    assert not_run(known, logs) == ["known: it did not write down what it ran"]
    seen = {"collected": ["tests/known/test_a.py::a", "tests/known/test_a.py::b"], "left_out": []}
    known.seen.write_text(json.dumps(seen | {"ran": ["tests/known/test_a.py::b"]}))
    assert not_run(known, logs) == ["tests/known/test_a.py::a", "tests/known/test_empty.py: no test in it"]


@pytest.mark.whole("the check's plugins, in a pytest of their own")
def test_the_plugin_tells_what_was_collected_left_out_and_run(pytester_run):
    """In a run that ends early, too."""
    source = "def test_a(): pass\ndef test_b(): assert False\ndef test_c(): pass\n"
    seen = pytester_run(source, "-x", "-k", "not test_a")
    assert [name.rpartition("::")[2] for name in seen["left_out"]] == ["test_a"]
    assert [name.rpartition("::")[2] for name in seen["collected"]] == ["test_b", "test_c"]
    assert [name.rpartition("::")[2] for name in seen["ran"]] == ["test_b"]


@pytest.mark.whole("the check's plugins, in a pytest of their own")
def test_the_plugin_tells_what_its_workers_ran(pytester_run):
    """Each test once, although each worker has collected all of them."""
    source = "def test_a(): pass\ndef test_b(): assert False\ndef test_c(): pass\n"
    seen = pytester_run(source, "-k", "not test_a", *SIDE_BY_SIDE)
    assert seen["status"] == pytest.ExitCode.TESTS_FAILED
    assert [name.rpartition("::")[2] for name in seen["left_out"]] == ["test_a"]
    assert [name.rpartition("::")[2] for name in seen["collected"]] == ["test_b", "test_c"]
    assert sorted(name.rpartition("::")[2] for name in seen["ran"]) == ["test_b", "test_c"]


@pytest.mark.whole("the check's plugins, in a pytest of their own")
@either_way
def test_a_run_whose_tests_were_all_left_out_has_passed(pytester_run, side_by_side):
    """A lane of long tests that are not due; one that finds no test, or that cannot be read, has not."""
    assert pytester_run("def test_a(): pass\n", "-k", "not test_a", *side_by_side)["status"] == 0
    assert pytester_run("", *side_by_side)["status"] == pytest.ExitCode.NO_TESTS_COLLECTED
    broken = pytester_run("def broken(:", "-k", "not test_a", *side_by_side)["status"]
    assert broken == pytest.ExitCode.TESTS_FAILED if side_by_side else pytest.ExitCode.INTERRUPTED


@pytest.mark.whole("the check's plugins, in a pytest of their own")
@either_way
def test_the_fast_tests_say_what_they_leave_to_the_check(tmp_path, side_by_side):
    """Each reason with its count, and every test of it once; what has no such mark runs."""
    (tmp_path / "test_few.py").write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "@pytest.mark.whole('days of it')\n@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): assert False\n"
        "@pytest.mark.compiled\ndef test_c(): assert False\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "tests.cheaper", "-p", "tests.fast"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path / "test_few.py"), *side_by_side]
    done = subprocess.run(command, cwd=ROOT, env=BARE, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout
    assert "3 tests left to the whole check (`make test`, `.ci/run`)" in done.stdout
    assert "    2 days of it\n    1 the data plane compiled\n" in done.stdout
    assert "1 passed" in done.stdout


def test_no_lane_of_the_check_leaves_out_what_is_marked_whole():
    """Only `make test-fast` has the plugin, and no lane chooses tests by a mark."""
    commands = [" ".join(command) for lane in all_lanes() for command in lane.commands]
    assert [command for command in commands if "tests.fast" in command or " -m not" in command] == []
    assert (ROOT / "Makefile").read_text().count("-p tests.fast") == 1


@pytest.fixture
def pytester_run(tmp_path):
    """`pytester_run(source, *arguments)` runs pytest on a file; returns what the plugin wrote, and the status."""

    def run_tests(source: str, *arguments: str) -> dict[str, Any]:
        (tmp_path / "test_few.py").write_text(source)
        seen = tmp_path / "seen.json"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.seen", "--seen", str(seen)]
        command += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path / "test_few.py"), *arguments]
        status = subprocess.run(command, cwd=ROOT, env=BARE, capture_output=True, check=False).returncode
        return json.loads(seen.read_text()) | {"status": status}

    return run_tests


# --- the command ---


@pytest.fixture
def checked(logs, monkeypatch, capsys):
    """`checked(*lanes)` runs the command with these lanes, and returns its status and what it printed."""

    def run_check(*lanes: Lane) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["check", "--long", "proxy"])
        monkeypatch.setenv("HIGHWATER_CACHE_DIR", str(logs / "cache"))
        monkeypatch.setenv(topics.ASKED_FOR, "none")  # put back afterwards; the command sets it
        monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        monkeypatch.setattr(check, "all_lanes", lambda **_: [*lanes])
        monkeypatch.setattr(check, "files_in_no_lane", lambda _: [])
        status = check.main()
        return status, capsys.readouterr().out

    return run_check


def seeing(name: str, *, collected: list[str], ran: list[str]) -> Lane:
    """A lane that writes down what it has seen."""
    seen = json.dumps({"collected": collected, "left_out": ["tests/x/test_x.py::long"], "ran": ran})
    return lane(name, f"echo '{seen}' > {check.LOGS}/{name}.json", folders=(f"tests/{name}",))


def test_what_passed_is_kept_when_every_lane_has(checked, logs):
    """With what each lane cost and how many tests it ran."""
    status, shown = checked(
        seeing("one", collected=["a"], ran=["a"]), lane("two", f'test "${topics.ASKED_FOR}" = proxy')
    )
    assert status == 0, shown
    assert "every test ran that was collected" in shown
    assert [line.split()[-2:] for line in shown.splitlines() if line.startswith("together")] == [["1", "1"]]
    assert list(check.read_passed(logs / "cache" / check.PASSED)) == ["proxy"]


@pytest.mark.parametrize("wrong", ["fails", "leaves one out", "waits for one that fails"])
def test_whatever_is_wrong_fails_the_check_and_nothing_is_kept(checked, logs, wrong):
    """A lane, a test, or a lane that could not begin."""
    good = seeing("one", collected=["a"], ran=["a"])
    lanes = {
        "fails": (good, lane("two", "exit 2")),
        "leaves one out": (seeing("one", collected=["a", "b"], ran=["a"]),),
        "waits for one that fails": (good, lane("two", "exit 2"), lane("three", "true", after=("two",))),
    }
    said = {"fails": "two failed with status 2", "leaves one out": "not run: b"}.get(wrong, "three was not begun")
    status, shown = checked(*lanes[wrong])
    assert (status, said in shown) == (1, True)
    assert check.read_passed(logs / "cache" / check.PASSED) == {}


# --- long tests ---


def test_each_topic_names_files_that_there_are():
    """Or a change of what was renamed would run nothing."""
    missing = [name for topic in TOPICS.values() for name in (*topic.about, *topic.alone) if not (ROOT / name).exists()]
    assert missing == []


def test_each_topic_has_tests():
    """What it is about would otherwise be tried by nothing."""
    assert [name for name in TOPICS if not marked(name)] == []


def test_few_files_need_an_engine_in_every_check():
    """An engine costs half a minute: another test of one is long, and belongs to a topic. Or none, as the pod's own.

    That the kernel kills an engine, serving or loading, is what people open Highwater for; and model runner V2 is what
    every GPU runs.
    """
    all_files = [path for folder in ("engine", "own_engine") for path in (ROOT / "tests" / folder).glob("test_*.py")]
    files = {path for path in all_files if "pytestmark = " not in path.read_text()}
    pods = {"test_pod.py", "test_pod_loading.py", "test_pod_serving.py"}
    assert {path.name for path in files} == {"test_journey.py", "test_runner_v2.py", *pods}


@pytest.fixture(scope="module")
def files() -> dict[str, set[str]]:
    """Each topic's files, as the tree is now."""
    return {name: set(digests(name)) for name in TOPICS}


@pytest.mark.whole("which changes make long tests due")
@pytest.mark.parametrize(
    ("changed_file", "due"),
    [
        ("app/highwater/policy/core.py", {"beside", "relief", "policy", "shown", "coverage"}),
        ("app/highwater/dashboard/parts.js", {"shown", "coverage"}),
        ("app/highwater/measure/report.py", {"shown", "beside", "coverage"}),
        ("tests/engine/storm.py", {"relief", "worker"}),
        ("tests/engine/test_journey.py", {"recorder"}),
        ("tests/unit/policy/test_core.py", {"coverage"}),
        ("docs/policy.md", set()),
        ("tests/topics.py", set()),
    ],
)
def test_a_change_makes_due_what_it_may_break(files, changed_file, due):
    """As the imports are now: a change of one file, and the topics whose long tests it makes run."""
    assert {name for name in TOPICS if changed_file in files[name]} == due


@pytest.mark.whole("which changes make long tests due")
def test_whatever_the_data_plane_runs_on_makes_its_long_tests_due(files):
    """Through every layer below it: a file that a module imports is as good as the module's own."""
    due = {name for name in TOPICS if "app/gated_proxy/logs.py" in files[name]}
    assert {"clients", "relief", "proxy", "beside"} <= due


def test_imports_are_followed_wherever_they_stand(tmp_path):
    """In a function, for types only, relative, from a package, and of a folder's `conftest.py`; a library's are not."""
    sources = {
        "app/one/__init__.py": "",
        "app/one/top.py": "import json\ndef later():\n    from . import middle\n",
        "app/one/middle.py": "if TYPE_CHECKING:\n    from one.low import Low\n",
        "app/one/low.py": "",
        "app/one/other.py": "import one.top\n",
        "tests/conftest.py": "import tests.fakes\n",
        "tests/fakes.py": "",
        "tests/test_top.py": "from one import top\n",
    }
    for name, source in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    found = imported_by([tmp_path / "tests/test_top.py"], tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in found} == {*sources} - {"app/one/other.py"}


@pytest.fixture
def topic(tmp_path, monkeypatch) -> Path:
    """A topic of one folder, and that folder."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "one.py").write_text("1")
    (folder / "two.py").write_text("2")
    monkeypatch.setattr(topics, "TOPICS", {"only": Topic("two files", ("app",))})
    monkeypatch.setattr(check, "digests", lambda name: digests(name, tmp_path))
    return folder


def passed(folder: Path) -> dict[str, dict[str, object]]:
    return {"only": {"when": "yesterday", "files": digests("only", folder.parent)}}


def test_long_tests_do_not_run_again_with_the_same_files(topic):
    """Whatever the commit is: what is in the files decides."""
    assert changed("only", passed(topic)) is None


def test_long_tests_run_when_a_file_changed_came_or_went(topic):
    """And the first of them is named."""
    before = passed(topic)
    (topic / "one.py").unlink()
    assert "app/one.py changed" in (changed("only", before) or "")
    (topic / "one.py").write_text("3")
    (topic / "three.py").write_text("3")
    assert "app/one.py and 1 more changed since they passed on this machine on yesterday" in (
        changed("only", before) or ""
    )


@pytest.mark.parametrize("found", [{}, {"only": {}}, {"only": {"files": None}}], ids=str)
def test_long_tests_run_where_nothing_is_known(topic, found):
    """As on a new machine."""
    assert changed("only", found) is not None


def test_what_passed_is_kept_beside_what_passed_before(tmp_path):
    """A file that cannot be read is nothing known, not an error."""
    path = tmp_path / "kept" / "passed.json"
    assert check.read_passed(path) == {}
    check.keep_passed(path, {"relief": {"a": "1"}})
    check.keep_passed(path, {"proxy": {"b": "2"}})
    assert {topic: found["files"] for topic, found in check.read_passed(path).items()} == {
        "relief": {"a": "1"},
        "proxy": {"b": "2"},
    }
    path.write_text("[")
    assert check.read_passed(path) == {}


def test_the_log_says_of_every_topic_whether_it_runs_and_why(capsys):
    """By name, where topics were named."""
    assert long_topics("proxy,policy", {}) == ["proxy", "policy"]
    shown = capsys.readouterr().out.splitlines()
    asked, not_asked = "it was asked for", "it was not asked for"
    assert [line.split(") ")[1] for line in shown] == [
        f"run: {asked}" if topic in ("proxy", "policy") else f"do not run: {not_asked}" for topic in TOPICS
    ]
    assert long_topics("none", {}) == []
    assert long_topics("all", {}) == list(TOPICS)
    with pytest.raises(SystemExit, match="no topic is called proxies; there are beside, worker"):
        long_topics("proxies", {})


@pytest.mark.parametrize(("named", "expected"), [(None, set(TOPICS)), ("none", set()), ("proxy", {"proxy"})])
def test_long_tests_are_asked_for_by_the_environment(monkeypatch, named, expected):
    """All of them where nobody says anything."""
    monkeypatch.delenv(topics.ASKED_FOR, raising=False)
    if named is not None:
        monkeypatch.setenv(topics.ASKED_FOR, named)
    assert topics.asked_for() == expected


def test_a_topic_that_there_is_not_is_an_error(monkeypatch):
    """It names those that there are."""
    monkeypatch.setenv(topics.ASKED_FOR, "prxy")
    with pytest.raises(ValueError, match=r"no topic prxy; there are beside, worker"):
        topics.asked_for()
