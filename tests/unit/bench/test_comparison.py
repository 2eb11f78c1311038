"""How a figure is judged beside its peers."""

import pytest

from bench.dataplane.comparison import NOT_MEASURED, Comparison, Spread
from bench.figure import Goal

AT_MOST_TWICE = Goal("at most", 2.0)


def comparison(goal: Goal | None = AT_MOST_TWICE, **given):
    return Comparison(what="work", unit="us", goal=goal, **given)


@pytest.mark.parametrize(
    ("goal", "value", "met"),
    [
        (Goal("under", 2.0), 2.0, False),
        (Goal("at most", 2.0), 2.0, True),
        (Goal("at most", 2.0), 2.01, False),
        (Goal("at least", 2.0), 2.0, True),
        (Goal("at least", 2.0), 1.99, False),
    ],
)
def test_a_goal_says_whether_its_limit_itself_will_do(goal: Goal, value: float, met: bool):
    """`under` is the only one that wants more than the limit."""
    assert goal.is_met(value) is met


def test_far_from_the_goal_it_is_decided():
    """The rounds scatter by less than what is between median and goal."""
    assert Spread((1.2, 1.3, 1.25, 1.21)).verdict(AT_MOST_TWICE) == "yes"
    assert Spread((3.2, 3.3, 3.25, 3.21)).verdict(AT_MOST_TWICE) == "**no**"


def test_nearer_to_the_goal_than_the_noise_nothing_is_decided():
    """Neither yes nor no is known."""
    assert Spread((1.7, 2.2, 1.9, 2.3)).verdict(AT_MOST_TWICE) == "not decided"


def test_one_spoilt_round_decides_nothing_and_hides_nothing():
    """A round that another process spoilt moves neither the median nor the noise; it stands in the spread."""
    spread = Spread((1.20, 1.22, 1.21, 1.19, 1.23, 1.20, 1.21, 26.0))
    assert spread.verdict(AT_MOST_TWICE) == "yes"
    assert str(spread) == "1.21 (1.19 to 26.00)"


def test_ratios_are_of_the_same_round():
    """The machine was half as fast in the second round, for both."""
    found = comparison(values={"sidecar": [15.0, 30.0], "nginx": [10.0, 20.0]})
    assert found.row([])[2] == "1.50 (1.50 to 1.50)"


def test_a_peer_that_could_not_be_had_leaves_its_goal_open():
    """No ratio, and no verdict that looks like one."""
    found = comparison(values={"sidecar": [15.0]})
    assert found.row(["sidecar"]) == ("work", "at most 2 x nginx", "15 us", "-", NOT_MEASURED)


def test_an_absolute_goal_is_judged_by_the_sidecars_own_value():
    """The ratios are shown all the same."""
    found = comparison(Goal("under", 80.0), values={"sidecar": [66.0, 67.0], "nginx": [15.0, 15.0]}, is_absolute=True)
    _, goal, *_, verdict = found.row(["sidecar", "nginx"])
    assert (goal, verdict) == ("under 80 us", "yes")


def test_nothing_is_divided_by_nothing():
    """A peer whose memory did not grow at all has no ratio."""
    assert comparison(values={"sidecar": [1.0], "nginx": [0.0]}).row([])[2:] == ("-", NOT_MEASURED)
