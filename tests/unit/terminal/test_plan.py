"""`highwater plan`: one screen, its exit status, its errors, what it loads; vLLM's answers are recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from highwater.explain import roads
from highwater.terminal.plan import text as plan_text
from highwater.terminal.plan.command import _is_there, plan
from tests.fakes.recorded_vllm import FILE, write_python
from tests.support.record_answers import COMMANDS, SCREENS, recorded, screens
from tests.unit.explain.test_roads import Rules

GIB = 1 << 30
LLAMA = Path(__file__).parents[1] / "explain" / "configs" / "llama-3.1-8b.json"


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(name="asked")
def _asked(tmp_path: Path, model: Path):
    python = write_python(tmp_path)

    def ask(own: str, flags: str, *more: str) -> Result:
        words = [*own.split(), *more, "--engine-python", str(python), "--", "vllm", "serve", str(model), *flags.split()]
        return CliRunner().invoke(plan, words)

    return ask


@pytest.fixture(name="built_in_rules")
def _built_in_rules(monkeypatch: pytest.MonkeyPatch) -> Rules:
    rules = Rules()
    monkeypatch.setattr(roads, "read_start", rules)
    monkeypatch.setattr("highwater.terminal.plan.command.engine_here", lambda: None)
    return rules


def run(*words: object) -> Result:
    return CliRunner().invoke(plan, [str(word) for word in words])


# The words of the first two: test_the_page_shows_what_the_command_prints.
@pytest.mark.parametrize(
    ("own", "flags", "status"),
    [
        ("--device H100", "--max-model-len 32768", 0),
        ("--device L4", "--max-model-len 65536", 1),
        ("--device 24GB", "--max-model-len 23840", 1),
    ],
)
def test_an_answer_is_one_screen(asked, own: str, flags: str, status: int) -> None:
    result = asked(own, flags)
    lines = result.stdout.splitlines()
    assert (result.exit_code, len(lines) <= 24, max(map(len, lines)) <= 100) == (status, True, True)


def test_a_size_that_is_a_label_is_called_so_and_bounds_leave_it_open(asked) -> None:
    result = asked("--device 24GB", "--max-model-len 23840")
    assert " more: --json" in result.stdout
    assert "(0 to " not in result.stdout  # blocks of the bound at which the start is refused
    assert result.stdout.startswith("May not fit: one request of 23,840 tokens needs 2.91 GiB")
    assert "note: 24GB is a label; drivers show less, in GiB: A10 22.49, L4 22.49, RTX4090 23.52" in result.stdout


def test_vllms_own_refusal_is_shown(asked) -> None:
    result = asked("--device L4", "-tp 3")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (
        1,
        "vLLM refuses it: Total number of attention heads (32) must be divisible by tensor parallel size (3).",
    )


def test_a_share_that_others_do_not_leave_is_refused_with_one_that_fits(asked) -> None:
    result = asked("--device L4 --others 3GiB", "--max-model-len 8192")
    assert result.exit_code == 1
    assert result.stdout.startswith("vLLM refuses it: Free memory on device (19.49/22.49 GiB)")
    assert "--gpu-memory-utilization 0.86" in result.stdout.partition("ways out")[2]


def test_an_unknown_flag_is_vllms_to_refuse(asked) -> None:
    result = asked("", "--no-such-flag 1")
    assert (result.exit_code, "unrecognized arguments: --no-such-flag 1" in result.stdout) == (2, True)


def test_without_a_card_nothing_is_compared(asked) -> None:
    result = asked("", "--max-model-len 32768")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "One request of 32,768 tokens needs 4.00 GiB of KV cache. It was compared with nothing"
    )


def test_given_bytes_are_judged_by_the_card_too(asked) -> None:
    too_long, too_full = (
        asked("--device L4", flags)
        for flags in (
            "--kv-cache-memory-bytes 5G --max-model-len 65536",
            "--kv-cache-memory-bytes 15G --max-model-len 8192",
        )
    )
    assert "the longest that fits is 40,944" in " ".join(too_long.stdout.split())
    assert "2.51 GiB are left beside the weights" in too_long.stdout
    assert (too_full.exit_code, "do not hold the weights (at least" in too_full.stdout) == (1, True)


def test_a_wish_has_its_command_line_and_without_a_card_the_bytes_that_it_needs(asked, model: Path) -> None:
    on_card, alone = asked("--device H100", "", "--wish", "4 x 8k"), asked("", "", "--wish", "4 x 8k")
    assert (on_card.exit_code, alone.exit_code) == (0, 0)
    assert on_card.stdout.splitlines()[0] == "Fits: 4 x 8,192 tokens need 4.00 GiB of 56.44 GiB."
    assert alone.stdout.splitlines()[0].startswith("4 x 8,192 tokens need 4.00 GiB on each rank; no device was named")
    assert f"  vllm serve {model} --max-model-len 8192 --max-num-seqs 4" in on_card.stdout
    assert "--kv-cache-memory-bytes 4297064448" in alone.stdout
    assert "no device was named" in alone.stdout


def test_a_wish_that_takes_more_ranks_says_what_is_of_one_of_them() -> None:
    told = " ".join(run(LLAMA, "--built-in", "--device", "L4", "--wish", "8 x 32k").stdout.split())
    assert told.startswith("Does not fit as it is; with 4 devices in place of 1 it fits")
    assert "8 x 32,768 tokens need 8.00 GiB of 14.32 GiB on each of 4 ranks." in told
    assert "As it is, 8 conversations" in told
    assert "of 2,097,152 bytes on a rank: 34,361,835,520 bytes (32.00 GiB)" in told


def test_the_built_in_refuses_images_for_a_model_that_takes_none() -> None:
    for size in ("1080p", "2042 tokens"):
        refused = run(LLAMA, "--built-in", "--device", "L4", "--wish", f"8 x 32k + 4 images of {size}")
        assert refused.exit_code == 2
        assert "wish: 4 images: LlamaForCausalLM takes none" in refused.stderr


def test_json_is_the_answer_with_what_was_asked_beside(asked) -> None:
    answer = json.loads(asked("--device L4", "--max-model-len 65536", "--json").stdout)
    assert (answer["status"], answer["kv_cache"]["needed_bytes"]) == ("does_not_fit", 8 * GIB)
    assert answer["ways_out"][0]["flags"].keys() == {"max_model_len"}
    assert answer["command_line"].endswith("--max-model-len 65536")


def test_a_vllm_that_cannot_be_asked_ends_with_4_and_no_guess(asked) -> None:
    result = asked("", "--max-model-len 5")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "highwater: this vLLM cannot be asked: not recorded" in result.stderr
    assert "record it" in result.stderr
    assert "--built-in answers without a vLLM" in result.stderr


def test_the_built_in_is_named_only_where_it_would_find_the_model(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("highwater.terminal.plan.command._is_there", lambda _: False)
    assert "--built-in" not in asked("", "--max-model-len 5").stderr
    monkeypatch.undo()
    assert [_is_there(model) for model in (None, "-", "/nowhere")] == [True, True, False]


def test_without_a_vllm_the_built_in_answers_and_says_so(built_in_rules: Rules, model: Path) -> None:
    result = run(model, "--max-model-len", "8192", "--device", "L4")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith("The built-in's rules, with the defaults of vLLM 0.32.0; NVIDIA L4")
    assert "note: no vLLM can be imported here; --engine-python PATH asks one" in result.stdout
    assert built_in_rules.flags[0].device_bytes == 23034 * GIB // 1024


@pytest.mark.usefixtures("built_in_rules")
def test_the_built_in_takes_a_config_json_and_standard_input(model: Path) -> None:
    renamed = model / "llama.json"
    (model / "config.json").rename(renamed)
    by_name = run(renamed, "--built-in")
    by_pipe = CliRunner().invoke(plan, ["--built-in", "--", "vllm", "serve", "-"], input=renamed.read_text())
    assert (by_name.exit_code, by_pipe.exit_code) == (0, 0)
    assert "note: " not in by_name.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("m", "--cpu-offload-gb", "4"), "highwater plan --engine-python PATH -- vllm serve m --cpu-offload-gb 4"),
        (("m", "--device", "80"), "--device: '80' must be 80GiB, or a size such as 22.5GiB, or one of H100, "),
        (("m", "--device", "H1000"), "--device: 'H1000' must be a size such as 22.5GiB, or one of H100, "),
        (("m", "--others", "some"), "--others: 'some' is not a size"),
        (("m", "--wish", "much"), "wish: 'much' is not understood"),
        (("/nowhere",), "model: '/nowhere' is no folder with a config.json"),
        (("Llama-3.1-8B/",), "is not in the local cache; give one that is"),
        ((f"/{'x' * 300}/m",), f"/{'x' * 300}/m"),  # more than a name may have
        (("m", "--table"), "--table: nothing to compare with; --device names a card"),
        (("--tabel", "vllm", "serve", "m"), "--tabel: what stands before 'vllm serve' is for highwater"),
        (("m", "--device", "L4", "--others", "3"), "--others: 3 is 3 bytes; write it as 3GiB"),
        (("--image", "i", "vllm", "serve", "-"), "--image: the model '-' must be a folder"),
        (("--image", "i", "vllm", "serve", "no/where"), "hf download no/where"),
        (("vllm serve /nowhere/config.json",), "model: '/nowhere/config.json' is no folder"),
        (("vllm serve $NOT_KNOWN_HERE -tp 2",), "put its value there"),
        ((), "the command line is empty; must be a model and flags, or 'vllm serve MODEL ...'"),
        (("vllm", "bench", "serve"), "the command line begins with 'vllm bench serve'"),
        (("m", "--engine-python", "/nowhere/python"), "--engine-python: /nowhere/python could not be started"),
        (
            ("m", "--measured", "/nowhere"),
            "/nowhere: cannot be read: No such file or directory; for --measured the log of one start is needed",
        ),
    ],
)
@pytest.mark.usefixtures("built_in_rules")
def test_input_that_makes_no_sense_ends_with_2_and_says_what_would_be_right(words: tuple[str, ...], said: str) -> None:
    result = run(*words, "--json")
    assert result.exit_code == 2
    assert said in result.stderr
    assert ("a vLLM answers for all" in result.stderr) <= ("model" not in said)  # no road finds one that is not there
    assert said in json.loads(result.stdout)["error"]


@pytest.mark.usefixtures("built_in_rules")
def test_a_table_is_requests_by_length_and_ranks(model: Path) -> None:
    rows = run(model, "--device", "L4", "--table", "--max-model-len", "8192").stdout.splitlines()
    lengths = [row.split()[0] for row in rows if row[:1].isdigit()]
    assert lengths == ["2,048", "4,096", "8,192", "16,384", "32,768"]
    assert max(map(len, rows)) <= 100


@pytest.mark.usefixtures("built_in_rules")
def test_measured_parts_settle_what_was_estimated(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("INFO 10-22 09:43:49 [a.py:1] Model loading took 15.00 GiB memory and 3 seconds\n"
                   "INFO 10-22 09:43:49 [b.py:2] Available KV cache memory: 4.00 GiB\n")  # fmt: skip
    words = (model, "--device", "L4", "--max-model-len", "8192", "--measured", log, "--json")
    kv = json.loads(run(*words).stdout)["kv_cache"]
    assert kv["available_bytes"] == pytest.approx(4 * GIB, abs=2)
    assert kv["grades"]["available_bytes"] == "measured"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--image", ["docker run --rm --network=none -e PYTHONPATH=/highwater -v ", "--entrypoint python3 vllm/x -m"]),
        ("--pod", ["kubectl exec -i vllm/x -- sh -c ", "kubectl exec vllm/x -- env PYTHONPATH=/tmp/highwater python3"]),
    ],
)
def test_a_container_is_asked_by_a_command_that_is_printed_and_not_run(option: str, expected: list[str]) -> None:
    result = run(option, "vllm/x", "--device", "22GiB", "--", "vllm", "serve", "m")
    assert result.exit_code == 0
    assert all(part in result.stdout for part in [*expected, "--card L4 --device-bytes 23622320128 -- vllm serve m"])
    assert result.stdout.splitlines()[-1] == "highwater plan answer.json"


def test_an_image_without_a_network_gets_what_the_line_names(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = tmp_path / "flags.yaml"
    flags.write_text("max-model-len: 9\n")
    said = run("--image", "i/vllm", "--", "vllm", "serve", model / "config.json", "--config", flags).stdout
    assert f"-v {flags}:{flags}:ro -v {model}:{model}:ro --entrypoint" in said
    assert f"vllm serve {model} --config {flags} > answer.json" in said
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "c"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    said = run("--image", "i/vllm", "--", "vllm", "serve", "a/b").stdout
    assert f"-v {tmp_path}/hub:/hub:ro -e HF_HUB_CACHE=/hub --entrypoint" in said


def test_an_answer_of_another_machine_is_shown(tmp_path: Path) -> None:
    found = next(answer for answer in json.loads(FILE.read_text()).values() if answer["status"] == "does_not_fit")
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"schema": 1, **found}))
    result = run(file)
    assert (result.exit_code, result.stdout.startswith("Does not fit: ")) == (1, True)
    assert "vLLM 0.32.0 itself; as on an NVIDIA" in result.stdout


def test_every_status_has_a_verdict() -> None:
    kv = {"needed_bytes": GIB, "available_bytes_low": 0, "available_bytes_high": 0, "max_model_len_that_fits": 0}
    said = plan_text.verdict({"status": "does_not_fit", "kv_cache": kv})
    assert said.endswith("0 B are left for it; no length fits.")
    unknown = {"status": "not_known", "kv_cache": kv}
    assert "It was compared with nothing" in plan_text.verdict(unknown)
    assert "What a start leaves of the card is not known" in plan_text.verdict({**unknown, "device": {"title": "L4"}})


def test_a_plan_loads_neither_torch_nor_the_sidecar(model: Path) -> None:
    code = (
        "import sys; from highwater.terminal.cli import main\n"
        f"try: main(['plan', {str(model)!r}, '--built-in', '--kv-cache-memory-bytes', '20GiB'])\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'fastapi', 'httpx', 'uvicorn', 'pydantic', 'numpy'}\n"
        "sys.exit(' '.join(slow & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_recording_keeps_every_answer_that_a_command_asked_for(tmp_path: Path) -> None:
    """Put to the record itself, it gives the record again."""
    found, known = recorded(write_python(tmp_path), Path("/any"), COMMANDS[:1]), json.loads(FILE.read_text())
    assert found
    assert found.items() <= known.items()


def test_the_page_shows_what_the_command_prints() -> None:
    """`python -m tests.support.record_answers screens` writes it again."""
    assert json.loads(SCREENS.read_text()) == screens()
