"""docs/performance.md: each run writes its own section."""

from bench.dataplane.report import Report
from bench.page import performance_page


def write(page: str, section: str, cell: str, *, notes: tuple[str, ...] = ()) -> str:
    report = Report(
        title=f"Title of {section}",
        columns=("work", "to nginx"),
        rows=[("JSON", cell)],
        facts=["Fact."],
        methods=["Method."],
    )
    return performance_page(
        page, section, report, command="make bench", machine="2 cores", day="2026-01-02", notes=notes
    )


def test_a_run_writes_its_own_section_and_keeps_the_other():
    """In the order of the page, whichever was measured first."""
    page = write("", "engine-proxy", "1.11")
    page = write(page, "data-plane", "2.22")
    page = write(page, "data-plane", "3.33")
    assert page.count("# Performance") == 1
    assert page.index("Title of data-plane") < page.index("3.33") < page.index("Title of engine-proxy")
    assert ("1.11" in page, "2.22" in page) == (True, False)


def test_writing_the_same_again_changes_nothing():
    """So a diff of the page is a diff of the figures."""
    page = write(write("", "data-plane", "2.22"), "engine-proxy", "1.11", notes=("Busy.",))
    assert write(page, "engine-proxy", "1.11", notes=("Busy.",)) == page
