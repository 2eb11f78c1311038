"""`highwater plan --live` and `--wish`: what is asked, what is printed, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from highwater.api.plan import PlanRequest, plan_answer
from highwater.commands.plan import plan as plan_command
from highwater.errors import CannotPlan, SidecarRefused
from tests.fakes import started
from tests.unit.api.test_plan import NOTHING_CACHED, Starts
from tests.unit.plan.test_live import engine_of

CONFIGS = Path("tests/unit/plan/configs")
QWEN3, GEMMA3 = CONFIGS / "qwen3-14b.json", CONFIGS / "gemma-3-27b.json"
LLAMA = CONFIGS / "llama-3.1-8b.json"


class FakeSidecar:
    """Answers as the real one does, of a start that is known."""

    def __init__(self, starts: Starts) -> None:
        self._starts = starts
        self.bodies: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path == "/memory/plan"
        self.bodies.append(body)
        try:
            return plan_answer(PlanRequest.model_validate(body), self._starts, NOTHING_CACHED)
        except CannotPlan as exc:
            raise SidecarRefused(f"refused: {exc}", status=exc.status, code=exc.code, message=str(exc)) from exc


@pytest.fixture(name="sidecar")
def _sidecar(monkeypatch: pytest.MonkeyPatch) -> FakeSidecar:
    fake = FakeSidecar(Starts(engine_of(started.story(), "0.12.0", 2)))

    @contextmanager
    def at(url: str):
        assert url == "http://sidecar:8001"
        yield fake

    monkeypatch.setattr("highwater.client.options.sidecar_at", at)
    return fake


@pytest.fixture(name="plan")
def _plan() -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(plan_command, [*map(str, words)])


def live(*words: str) -> tuple[str, ...]:
    """Return the words of a question to the running engine."""
    return ("--live", "http://sidecar:8001", *words)


def test_flags_go_out_as_they_were_given(sidecar: FakeSidecar, plan: Callable[..., Result]) -> None:
    """Defaults of the command's own are how the engine runs."""
    result = plan(*live("--max-model-len", "64k", "--kv-cache-dtype", "fp8"))
    assert sidecar.bodies == [{"max_model_len": 64_000, "kv_cache_dtype": "fp8"}]
    assert (result.exit_code, result.output.splitlines()[1]) == (
        0,
        "It fits: the KV cache holds a request of 64,000 tokens.",
    )


def test_what_does_not_fit_has_an_exit_status_and_the_longest(
    sidecar: FakeSidecar, plan: Callable[..., Result]
) -> None:
    """As without --live."""
    result = plan(*live("--max-model-len", "700000"))
    assert (result.exit_code, result.output.splitlines()[1]) == (
        1,
        "It does not fit: the longest that fits is 645,120.",
    )


def test_json_is_the_sidecars_answer(sidecar: FakeSidecar, plan: Callable[..., Result]) -> None:
    """Unchanged."""
    answer = json.loads(plan(*live("--json")).output)
    assert (answer["schema"], answer["kv_cache"]["blocks"]) == (1, 5_040)


def test_an_estimate_is_shown_between_its_bounds(sidecar: FakeSidecar, plan: Callable[..., Result]) -> None:
    """With the reason as a note."""
    output = plan(*live("--max-num-batched-tokens", "64K")).output
    assert "KV cache        40.44 GiB (between 40.44 GiB and 44.30 GiB), estimated" in output
    assert "note: The peak of activation was measured with 32768 batched tokens" in output


def test_a_refusal_has_the_sidecars_reason(sidecar: FakeSidecar, plan: Callable[..., Result]) -> None:
    """Exit status 2, as for any input that is refused."""
    result = plan(*live("--block-size", "64"))
    assert result.exit_code == 2
    assert "highwater: block_size: 64 is not how the engine runs" in result.output


def test_a_wish_prints_the_command_line_its_reasons_and_the_proof(
    sidecar: FakeSidecar, plan: Callable[..., Result]
) -> None:
    """16 x 40k are too many for 645,120 tokens as they are."""
    result = plan(*live("--wish", "16 x 40k"))
    assert sidecar.bodies == [{"wish": "16 x 40k"}]
    assert result.exit_code == 1  # not as the engine runs
    assert "16 x 320 blocks and the null block, 5,121 in all" in result.output
    assert "  vllm serve MODEL --max-model-len 40960 --max-num-seqs 16 --kv-cache-dtype fp8" in result.output
    assert "fewer conversations: 15 of this length fit" in result.output


def test_images_in_pixels_are_counted_by_the_folder_that_is_named(
    sidecar: FakeSidecar, plan: Callable[..., Result], tmp_path: Path
) -> None:
    """The sidecar is asked in tokens."""
    vision = {"patch_size": 16, "spatial_merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": vision}))
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    assert plan(tmp_path, *live("--wish", "8 x 32k + 4 images of 1080p each")).exit_code == 0
    assert sidecar.bodies == [{"wish": "8 x 32768 + 4 images of 2042 tokens"}]


def test_a_wish_for_a_model_that_does_not_run_names_the_bytes_it_needs(plan: Callable[..., Result]) -> None:
    """16,385 blocks of 1,310,720 bytes: 20 KV heads' worth of a Qwen3-14B on two ranks."""
    answer = json.loads(plan(QWEN3, "--wish", "8 x 32k", "-tp", "2", "--json").output)
    assert answer["wish"]["chosen"]["flags"] == {
        "max_model_len": 32_768,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 16_385 * 1_310_720,
    }
    assert answer["command_line"].startswith(f"vllm serve {QWEN3} --tensor-parallel-size 2 --max-model-len 32768")


def test_a_wish_without_a_device_is_not_said_to_fit(plan: Callable[..., Result]) -> None:
    """Nothing was compared: what it needs is said instead."""
    shown = plan(QWEN3, "--wish", "8 x 32k", "-tp", "2").output
    assert "It fits" not in shown
    assert "No device was named, so nothing was compared. The KV cache needs 20.00 GiB on each rank, as in:" in shown
    assert "--kv-cache-memory-bytes" in shown


def test_the_needed_bytes_are_just_enough(plan: Callable[..., Result]) -> None:
    """With them it fits; with a byte less it does not."""
    enough = 16_385 * 1_310_720
    fits = [
        json.loads(plan(QWEN3, "--wish", "8 x 32k", "-tp", "2", "--kv-cache-memory-bytes", size, "--json").output)[
            "wish"
        ]
        for size in (enough, enough - 1)
    ]
    assert [wish["fits"] for wish in fits] == [True, False]


def test_images_without_a_size_are_refused_where_no_engine_shows_any(plan: Callable[..., Result]) -> None:
    """Never guessed."""
    result = plan(GEMMA3, "--wish", "8 x 32k + 4 images")
    assert (result.exit_code, "wish: 4 images: of what size?" in result.output) == (2, True)


def test_without_a_model_and_without_an_engine_there_is_nothing_to_plan(plan: Callable[..., Result]) -> None:
    """The message names both."""
    result = plan("--wish", "8 x 32k")
    assert (result.exit_code, "CONFIG_OR_DIR is missing; without it, --live URL" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        (("--device", "80GiB"), "--device"),
        (("--vllm-version", "0.11.0"), "--vllm-version"),
        (("--platform", "cuda"), "--platform"),
        (("--measured", "/nonexistent"), "--measured"),
        (("--oracle", "/bin/true"), "--oracle"),
        (("--wish", "8 x 32k", "--max-model-len", "4096"), "--max-model-len"),
    ],
)
def test_what_a_running_engine_or_a_wish_decides_is_refused_on_the_command_line(
    sidecar: FakeSidecar, plan: Callable[..., Result], options: tuple[str, ...], option: str
) -> None:
    """An option that changed nothing would look as if it had been taken."""
    result = plan(*live(*options))
    assert (result.exit_code, sidecar.bodies) == (2, [])
    assert f"leave {option} out" in result.output


@pytest.fixture(name="on_a_card")
def _on_a_card(plan: Callable[..., Result], tmp_path: Path) -> Callable[..., Result]:
    """Return a command about a model whose config.json tells all that the budget of a card needs."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(QWEN3.read_text()), "vocab_size": 151_936}))
    return lambda *words: plan(config, "--vllm-version", "0.19.0", *words)


def test_a_wish_for_a_model_that_does_not_run_has_the_plan_of_its_flags(on_a_card: Callable[..., Result]) -> None:
    """Grades, bounds and notes are those of the plan with the flags that were found."""
    answer = json.loads(on_a_card("--device", "80GiB", "--wish", "2 x 4k", "--json").output)
    assert (answer["schema"], answer["vllm_version"]) == (1, "0.19.0")
    assert answer["flags"]["max_model_len"] == 4_096
    assert answer["kv_cache"]["grades"]["available_bytes"] == "estimated"
    available = answer["budget"]["available_bytes"]
    assert available["low"] < available["bytes"] < available["high"]
    without_a_card = json.loads(on_a_card("--wish", "2 x 4k", "--json").output)
    assert without_a_card["kv_cache"]["grades"]["available_bytes"] == "exact"
    assert any("--max-num-batched-tokens" in note for note in without_a_card["notes"])


def test_a_wish_that_the_bounds_leave_open_may_fit(on_a_card: Callable[..., Result]) -> None:
    """The bounds are printed beside the grade; exit status 1, as of a plan whose bounds leave it open."""
    words = ("--device", "39.2GiB", "--wish")
    available = json.loads(on_a_card(*words, "1 x 1k", "--json").output)["budget"]["available_bytes"]
    # A token takes 160 KiB.
    between = (available["low"] + available["bytes"]) // 2 // (160 * 1024)
    open_one, certain = on_a_card(*words, f"1 x {between}"), on_a_card(*words, "1 x 1k")
    assert (open_one.exit_code, certain.exit_code) == (1, 0)
    assert "It may fit (the bounds of the estimate leave that open):" in open_one.output
    assert "It fits:" in certain.output
    for printed in (open_one.output, certain.output):
        assert "KV cache of a rank with these flags: " in printed
        assert " (between " in printed


def test_a_wish_on_a_device_whose_budget_cannot_be_made_is_refused_with_the_reason(plan: Callable[..., Result]) -> None:
    """It would be granted whatever the device: what a CPU has resident no config.json tells."""
    words = (QWEN3, "--wish", "8 x 32k", "--platform", "cpu", "--kv-cache-memory-bytes", "80GiB")
    assert plan(*words).exit_code == 0
    result = plan(*words[:-2], "--device", "1GiB")
    assert result.exit_code == 2
    assert "wish: what a start leaves of --device for the KV cache is not known" in result.output
    assert "The reason: --platform is 'cpu': what a CPU engine has resident" in result.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--kv-cache-memory-bytes", "80GiB"), "do not hold the weights (at least"),
        (("--in-use", "23GiB"), "refuses to start: 1.00 GiB of the card are free"),
    ],
)
def test_a_wish_is_not_granted_on_a_card_that_is_too_full(
    plan: Callable[..., Result], more: tuple[str, ...], said: str
) -> None:
    result = plan(LLAMA, "--wish", "8 x 8k", "--device", "24GiB", *more)
    assert result.exit_code == 1
    assert "It does not fit" in result.output
    assert said in result.output


def test_a_wish_beside_given_bytes_says_that_the_card_leaves_it_open(plan: Callable[..., Result]) -> None:
    words = (LLAMA, "--wish", "1 x 8k", "--kv-cache-memory-bytes", "8GiB", "--device")
    assert plan(*words, "80GiB").exit_code == 0
    result = plan(*words, "18GiB")
    assert (result.exit_code, "may fit" in result.output) == (1, True), result.output


def test_the_nearest_have_whole_command_lines(plan: Callable[..., Result]) -> None:
    """The model, the flags that were given, and the limit of images."""
    given = ("-tp", "2", "--kv-cache-dtype", "fp8", "--kv-cache-memory-bytes", "4GiB")
    result = plan(GEMMA3, "--wish", "64 x 8k + 2 images of 256 tokens", *given)
    lines = [line.partition(": vllm serve ")[2] for line in result.output.partition("Nearest:")[2].splitlines()]
    offered = [line for line in lines if line]
    assert offered
    for line in offered:
        assert line.startswith(f"{GEMMA3} --")
        assert "--kv-cache-dtype fp8" in line
        assert "--kv-cache-memory-bytes 4294967296" in line
        assert line.endswith("--limit-mm-per-prompt '{\"image\": 2}'")


@pytest.mark.parametrize("images", ["4 images of 200 tokens", "4 images of 1080p", "4 images"])
def test_images_for_a_model_of_text_are_refused(plan: Callable[..., Result], images: str) -> None:
    """However large they are: there is no flag that would let it see them."""
    result = plan(QWEN3, "--wish", f"8 x 32k + {images}")
    assert result.exit_code == 2
    assert "wish: 4 images: the model ('qwen3') takes none" in result.output


def test_a_live_plan_that_the_bounds_leave_open_may_not_fit(sidecar: FakeSidecar, plan: Callable[..., Result]) -> None:
    """Twice the tokens of a step are taken to double the activation peak at most."""
    assert (
        "It may not fit: by the estimate the longest that fits is 58"
        in plan(*live("--max-num-batched-tokens", "64K", "--max-model-len", "610K")).output
    )
    assert "It fits:" in plan(*live("--max-num-batched-tokens", "64K")).output
