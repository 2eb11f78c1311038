"""A shell's text as people have it in a chat or a script: the server's words in it, and nothing of the shell's."""

from __future__ import annotations

import pytest

from highwater.plan.command_line import read_line
from kvplan.errors import PlanError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("vllm serve m -tp 2 &", "vllm serve m -tp 2"),
        ("vllm serve m -tp 2&", "vllm serve m -tp 2"),
        ("vllm serve m -tp 2 2>&1 | tee log", "vllm serve m -tp 2"),
        ("nohup vllm serve m > vllm.log 2>&1 < /dev/null &\nsleep 9; curl x", "vllm serve m"),
        ("vllm serve m &>>log --port 3; echo done", "vllm serve m --port 3"),
        ("set -e\ncd /opt && A=1 exec vllm serve m -tp 2\necho started", "A=1 vllm serve m -tp 2"),
        ("export A=1,2\nvllm serve m", "A=1,2 vllm serve m"),
        ("sudo -E env A=1 vllm serve m", "A=1 vllm serve m"),
        ("A=1 numactl -N 0 uv run vllm serve m", "A=1 vllm serve m"),
        ("M=m\nvllm serve $M -tp ${TP:-4}", "vllm serve m -tp 4"),
        ("M=m\nARGS='-tp 2 --port 9'\nvllm serve \"${M}\" $ARGS", "vllm serve m -tp 2 --port 9"),
        ("vllm serve '$M'", "vllm serve '$M'"),
        ("vllm serve m \\ \n  --a 1 \\\n  # --b 2 \\\n  --c 3", "vllm serve m --a 1 --c 3"),
        ("vllm serve m \\\r\n  --a 1 \\", "vllm serve m --a 1"),
        ("vllm serve\nm\n--max-model-len\n9\n--a", "vllm serve m --max-model-len 9 --a"),
        ("vllm serve m -k a#b -sc '{\"a\":\n1}' --b ''", "vllm serve m -k 'a#b' -sc '{\"a\":\n1}' --b ''"),
        ("docker run --entrypoint vllm -e VLLM_A=1 vllm/vllm-openai serve m", "VLLM_A=1 vllm serve m"),
        ("docker run --entrypoint=python3 v/vllm -m vllm.entrypoints.openai.api_server -tp 2", "vllm serve -tp 2"),
        ("docker run -it me/server:1 vllm serve m", "vllm serve m"),
        ("sudo docker run v/vllm bash -c 'vllm serve m -tp 2 | tee log'", "vllm serve m -tp 2"),
    ],
)  # fmt: skip
def test_a_text_of_a_shell_is_its_one_command_line(given: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TP", raising=False)
    assert str(read_line([given])) == expected


def test_a_variable_is_that_of_the_shell_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_SHELL", "m")
    assert read_line(["vllm serve $OF_THE_SHELL -tp $NOT_OF_IT"]).words == ("m", "-tp", "$NOT_OF_IT")


@pytest.mark.parametrize(("given", "said"), [("vllm serve <your model>", "holds <your model>"), ("m 'a", "is open")])
def test_what_is_no_command_line_is_refused(given: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        read_line([given])
