"""docs/figures.md and docs/relief.md: each measurement writes its own block."""

import pytest

from bench.__main__ import BENCHES, DOCS, PAGES
from bench.dataplane.report import Report
from bench.figure import Figure, Goal
from bench.page import replaced, with_figures, with_section


def write(page: str, section: str, cell: str, *, notes: tuple[str, ...] = ()) -> str:
    report = Report(
        title=f"Title of {section}",
        columns=("work", "to nginx"),
        rows=[("JSON", cell)],
        facts=["Fact."],
        methods=["Method."],
    )
    return with_section(page, section, report, command="make bench", machine="2 cores", day="2026-01-02", notes=notes)


PAGE = "# A\n\n<!-- one -->\n<!-- end of one -->\n\nBy hand.\n\n<!-- two -->\n<!-- end of two -->\n"


def test_a_run_writes_its_own_section_and_keeps_the_rest():
    """Whichever was measured first."""
    page = write(write(write(PAGE, "two", "1.11"), "one", "2.22"), "one", "3.33")
    assert page.index("Title of one") < page.index("3.33") < page.index("By hand.") < page.index("Title of two")
    assert ("1.11" in page, "2.22" in page) == (True, False)


def test_writing_the_same_again_changes_nothing():
    """So a diff of the page is a diff of the figures."""
    page = write(PAGE, "one", "1.11", notes=("Busy.",))
    assert write(page, "one", "1.11", notes=("Busy.",)) == page


def test_the_machine_that_the_page_begins_with_is_not_named_again():
    """Another one is, in the block that was measured there."""
    told = PAGE.replace("# A\n", "# A\n\nMeasured on 2\ncores.\n")
    assert "`make bench`, 2026-01-02.\n" in write(told, "one", "1.11")
    assert "Machine: 2 cores." in write(told.replace("2\ncores", "4 cores"), "one", "1.11")


def test_a_page_without_the_place_is_refused():
    """A figure that goes nowhere would be lost."""
    with pytest.raises(ValueError, match="the place of three is there 0 times"):
        write(PAGE, "three", "1.11")


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_every_measurement_has_its_place(name):
    """On the page that shows it, once."""
    page = (DOCS / PAGES.get(name, "figures.md")).read_text()
    assert "XYZZY" in replaced(page, name, f"end of {name}", "XYZZY")


@pytest.mark.parametrize(("goal", "columns"), [(Goal("under", 5.0), "| goal "), (None, "| what ")])
def test_figures_are_written_with_their_method(goal, columns):
    """And with their goals, where there are any."""
    figure = Figure(what="A", value=2.0, unit="ms", goal=goal, spread="rounds 1 to 3", method="By hand.")
    page = with_figures(
        PAGE, "one", [figure], command="make bench", machine="2 cores", day="2026-01-02", notes=["Busy."]
    )
    block = page[: page.index("<!-- end of one")]
    assert [text in block for text in (columns, "2 ms (rounds 1 to 3)", "- By hand.", "- Busy.", "| goal ")] == [
        *[True] * 4,
        goal is not None,
    ]
