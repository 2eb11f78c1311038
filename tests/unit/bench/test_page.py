"""docs/performance.md: each run writes its own section."""

import pytest

from bench.dataplane.report import Report
from bench.page import with_section


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


def test_a_page_without_the_place_is_refused():
    """A figure that goes nowhere would be lost."""
    with pytest.raises(ValueError, match="the place of three is there 0 times"):
        write(PAGE, "three", "1.11")
