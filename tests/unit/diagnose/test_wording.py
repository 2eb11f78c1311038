"""What every finding says, with its figures and advice, in a golden file (golden/findings.txt); and the catalogues."""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

from highwater.diagnose import finding
from highwater.diagnose.case import of_incident
from highwater.diagnose.finding import ADVICE, Finding
from highwater.diagnose.log import messages
from highwater.diagnose.log.story import story_of
from highwater.diagnose.rules.book import RULES, judged
from highwater.diagnose.rules.device import wake_up_failed
from highwater.diagnose.rules.setup import CHECKS
from tests.fakes.incident import diagnosed, evidence
from tests.golden import golden
from tests.unit.diagnose import test_host, test_load, test_setup, test_start
from tests.unit.diagnose.incidents import test_diagnosis, test_sleep

GOLDEN = Path(__file__).parent / "golden" / "findings.txt"
WORKER = "(Worker_TP0 pid=4242) ERROR 09-02 08:04:02 [multiproc_executor.py:1020] "
# Of each memory, and of each reason that a message's figures give.
LOGS = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00 GiB. GPU 0 has a total capacity of 15.98 GiB "
    "of which 8.07 GiB is free. Of the allocated memory 7.14 GiB is allocated by PyTorch, and 320.85 MiB is reserved "
    "by PyTorch but unallocated.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 60.96 GiB "
    "of which 512.00 MiB is free. Of the allocated memory 50.00 GiB is allocated by PyTorch, and 9.00 GiB is reserved "
    "by PyTorch but unallocated.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 60.96 GiB "
    "of which 512.00 MiB is free. Including non-PyTorch memory, this process has 30.00 GiB memory in use. Of the "
    "allocated memory 29.00 GiB is allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 60.96 GiB "
    "of which 512.00 MiB is free. Of the allocated memory 59.00 GiB is allocated by PyTorch, and 10.00 MiB is reserved "
    "by PyTorch but unallocated.",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 60.96 GiB "
    "of which 9.00 GiB is free. Of the allocated memory 50.00 GiB is allocated by PyTorch, and 10.00 MiB is reserved "
    "by PyTorch but unallocated.",
    "RuntimeError: Insufficient space in /dev/shm for a region: 16384 MiB required, 7800 MiB free.",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 1024 bytes.",
]


def all_findings() -> Iterator[tuple[str, Finding]]:
    """Every finding that a test of a rule makes, and where."""
    for name, given in test_diagnosis.FOUND:
        yield "incident", next(one for one in judged(of_incident(given)) if one.name == name)
    for line in LOGS:
        found = diagnosed(evidence("died"), story_of([WORKER + line]))
        yield from (("incident", one) for one in found if one.name in test_diagnosis.OF_THE_LOG)
    asleep = test_sleep.asleep()
    for lines in (test_sleep.FAILED, test_sleep.FAILED[1:2]):
        failed = wake_up_failed(story_of(lines), test_sleep.ranks(40, 50), asleep)
        assert failed is not None
        yield "an event", failed
    for name, load in test_load.FOUND:
        yield "load", next(one for one in test_load.findings(load) if one.name == name)
    for start in test_start.FOUND:
        yield from (("start", one) for one in test_start.found_of(*start))
    for case in test_host.FOUND:
        yield from (("host", one) for one in judged(case))
    for topic, changed, _, _ in test_setup.FOUND:
        answer = CHECKS[topic](test_setup.facts(**changed))
        assert isinstance(answer, Finding)
        yield f"set-up, {topic}", answer


def shown(where: str, found: Finding) -> str:
    lines = [f"{found.weight}: {found.title}", found.text]
    lines += [f"{name} = {value}" for name, value in found.figures.items()]
    lines += [f"-> {advice.setting or advice.change}" for advice in found.advice]
    wrapped = (textwrap.fill(line, 118, subsequent_indent="  ", break_long_words=False) for line in lines if line)
    return "\n".join([f"[{found.name}] {where}", *(textwrap.indent(line, "  ") for line in wrapped)])


def test_every_finding_says_what_the_golden_file_has():
    told = list(all_findings())
    text = "\n\n".join(dict.fromkeys(shown(where, found) for where, found in told)) + "\n"
    assert text == golden(GOLDEN, text)
    assert "None" not in "".join(found.title + found.text for _, found in told)


def test_every_finding_is_there():
    named = {found.name for _, found in all_findings()}
    set_up = {name for _, _, _, name in test_setup.FOUND}
    assert {rule.name for rule in RULES if "set-up" not in rule.where} | set_up | {"wake_up_failed"} == named


# --- the catalogues: the rules and messages that name sentences and advice ---

AREA = Path(finding.__file__).parents[1]
SOURCES = [*(AREA / "diagnose").rglob("*.py"), AREA / "terminal" / "status.py"]
WORDING = tomllib.loads(Path(finding.__file__).with_name("findings.toml").read_text())
MESSAGES = tomllib.loads(Path(messages.__file__).with_name("messages.toml").read_text())


def given_figures() -> dict[str, set[str]]:
    """The names that each rule gives its finding's sentences, by the finding."""
    calls = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given: dict[str, set[str]] = {}
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id == "finding":
            figures = [node for part in call.args[1:] for node in ast.walk(part) if isinstance(node, ast.Dict)]
            keys = {key.value for figure in figures for key in figure.keys if isinstance(key, ast.Constant)}
            given[call.args[0].value] = keys | {keyword.arg for keyword in call.keywords}
    return given


def named_figures(templates: str | list[str]) -> set[str]:
    """The names in curly braces."""
    listed = [templates] if isinstance(templates, str) else templates
    return {name for template in listed for _, name, _, _ in Formatter().parse(template) if name is not None}


def test_every_finding_has_its_sentences_and_every_sentence_its_figures():
    given = given_figures()
    assert set(given) == set(WORDING)
    for name, row in WORDING.items():
        assert row["title"], name
        said = [row["title"], row.get("text", ()), row.get("change", ())]
        figures = row.get("figures", {})
        assert {path.partition(".")[0] for path in figures.values()} <= given[name], name
        assert set().union(*map(named_figures, said)) <= given[name] | set(figures), name


def test_every_piece_of_advice_says_what_it_costs():
    assert all(each.setting and each.change and each.cost.endswith(".") for each in ADVICE.values())
    given = {name for row in (*WORDING.values(), *MESSAGES.values()) for name in row.get("advice", ())}
    quoted = {name for path in SOURCES for name in re.findall(r"\"(\w+)\"", path.read_text())}
    assert set(ADVICE) <= given | quoted
    assert given <= set(ADVICE)
    assert Path(finding.__file__).with_name("advice.toml") in AREA.glob("diagnose/*.toml")


def test_every_message_of_memory_says_which():
    rows = [row for name, row in MESSAGES.items() if name != "prefixes"]
    assert {row.get("of_memory") for row in rows} == {None, "device", "host", "shm", "unclear"}
    assert {row.get("part", "cause") for row in rows} == {"cause", "end", "wait", "event"}
