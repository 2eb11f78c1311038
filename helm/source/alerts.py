"""The alerts: what each fires on, for how long, and the words an operator gets at night.

Every expression holds with several ranks (each has an alert of its own where that matters), across restarts of sidecar
and engine (counters only through `increase`, slopes only within one life of the engine), and with series that are not
there: what is not known fires nothing, but that it is not known does. Our own labels are left out by `ignoring` and
`without`, so that whatever labels a scrape adds stay on the alert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from helm.source.metrics import names_in

Severity: TypeAlias = Literal["critical", "warning", "info"]

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
_WHERE = "{{ or $labels.pod $labels.instance }}"
_RANK = "rank {{ $labels.rank }} ({{ $labels.device }}) of " + _WHERE

_FREE = "highwater_device_memory_free_bytes"
_OF_SERVER = "sum without (path_class, method, code, result)"


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert.

    Attributes:
        name: Also its runbook's.
        expr: PromQL; `{window}`, `{recent}` and `{hour}` are put in as durations.
        window: Seconds that the expression looks back.
        holds: Seconds for which it must hold.
        severity: critical wakes somebody, warning is for the day, info for a dashboard.
        summary: One line.
        description: What is known, with values, and what it means.
        ranks: Whether each rank has an alert of its own.
    """

    name: str
    expr: str
    holds: float
    severity: Severity
    summary: str
    description: str
    window: float = 15 * MINUTE
    ranks: bool = False

    def __post_init__(self) -> None:
        """Every metric that is read exists."""
        names_in(self.expr)

    def expression(self, pace: float = 1.0) -> str:
        """The PromQL, in a world that goes so many times faster."""
        return self.expr.format(
            window=duration(self.window / pace), recent=duration(self.window / 6 / pace), hour=duration(HOUR / pace)
        )


def duration(seconds: float) -> str:
    """As Prometheus writes it: `1d`, `30m`, `90s`, `250ms`."""
    if seconds != int(seconds):
        return f"{max(round(seconds * 1000), 1)}ms"
    for unit, size in (("d", int(DAY)), ("h", int(HOUR)), ("m", int(MINUTE))):
        if seconds >= size and seconds % size == 0:
            return f"{int(seconds) // size}{unit}"
    return f"{int(seconds)}s"


ALERTS = (
    Alert(
        name="HighwaterShortageNotRelieved",
        # Bytes where the rule is about a device's free bytes or ratio; 1 for any other rule at high water. A relief
        # that helps is over within seconds, so the state's changes between its steps must not begin the wait anew.
        expr="""(max without (rank) (highwater_policy_short_bytes) > 0
  unless ignoring (state) (highwater_policy_state{{state="held"}} == 1))
or max without (state) (highwater_policy_state{{state=~"short|urgent|acting|resting"}}) == 1""",
        holds=10 * MINUTE,
        severity="warning",
        summary=f"{_WHERE} is short of memory by rule {{{{ $labels.rule }}}}, and nothing has relieved it",
        description=(
            "{{ if gt $value 1.0 }}To reach low water, {{ $value | humanize1024 }}B must be given back on one rank. "
            "{{ else }}What the rule watches is at high water. {{ end }}"
            "For ten minutes it has not been brought back to low water: nothing here can be given back, it was not "
            "enough, or the policy only observes. `highwater status` says which. A large request may fail next."
        ),
    ),
    Alert(
        name="HighwaterMemoryFullWithinHour",
        # Free bytes, since those run out on every device. Of one life of the engine, after its warm-up: loading and
        # profiling look like the steepest leak. And in earnest: half a percent of the device lost in the window, and
        # falling to its very end, so that the step at the first images is over before it counts.
        expr=f"""({_FREE} / -deriv({_FREE}[{{window}}]) > 0) < 3600
and ({_FREE} offset {{window}} - {_FREE}) > 0.005 * highwater_device_memory_total_bytes
and deriv({_FREE}[{{recent}}]) < 0
and ignoring (rank, device, host) (changes(highwater_engine_up[{{window}}]) == 0)""",
        window=30 * MINUTE,
        holds=10 * MINUTE,
        severity="warning",
        summary=f"The memory of {_RANK} will be full within the hour",
        description=(
            "At the pace of the last half hour the device is full in {{ $value | humanizeDuration }}. It has been "
            "falling all that time, in one life of the engine."
        ),
        ranks=True,
    ),
    Alert(
        name="HighwaterEngineStuck",
        expr='max without (state) (highwater_engine_state{{state="stuck"}}) == 1',
        holds=MINUTE,
        severity="critical",
        summary=f"The engine of {_WHERE} is stuck",
        description=(
            "Its workers' recorders show that it will not go on by itself. vLLM's `/health` may well say 200 all the "
            "while: it does not ask the workers. Requests hang."
        ),
    ),
    Alert(
        name="HighwaterEngineNotAnswering",
        expr='max without (state) (highwater_engine_state{{state="not_answering"}}) == 1',
        holds=MINUTE,
        severity="warning",
        summary=f"The engine of {_WHERE} answers no call",
        description=(
            "For longer than `max_step_seconds` it has answered nothing, and no recorder tells whether it moves. It "
            "hangs, or a step takes very long. It is not ready, and is not restarted."
        ),
    ),
    Alert(
        name="HighwaterEngineGone",
        # An end is a state for a minute: after that the engine is waited for as starting.
        expr='max without (state) (max_over_time(highwater_engine_state{{state="gone"}}[{recent}])) == 1',
        window=30 * MINUTE,
        holds=0,
        severity="warning",
        summary=f"The engine of {_WHERE} ended",
        description="Within the last five minutes it was there, and then nothing listened at its address.",
    ),
    Alert(
        name="HighwaterEngineNotStarted",
        expr='max without (state) (highwater_engine_state{{state=~"starting|gone"}}) == 1',
        holds=30 * MINUTE,
        severity="critical",
        summary=f"The engine of {_WHERE} does not come up",
        description="For half an hour nothing has answered at its address: it does not start, or loads for very long.",
    ),
    Alert(
        name="HighwaterEnginePaused",
        expr='max without (state) (highwater_engine_state{{state="paused"}}) == 1',
        holds=5 * MINUTE,
        severity="warning",
        summary=f"The engine of {_WHERE} is paused",
        description=(
            "For five minutes it has taken requests and run none. Highwater did not pause it, and does not resume it: "
            "`POST /resume` of vLLM does."
        ),
    ),
    Alert(
        name="HighwaterRanksMissing",
        # All of them missing is another matter: the report is stale then, or the engine is gone.
        expr="(highwater_ranks_expected - highwater_ranks_reported) > 0 and highwater_ranks_reported > 0",
        holds=2 * MINUTE,
        severity="warning",
        summary=f"Ranks of {_WHERE} are not heard of: {{{{ $value }}}}",
        description=(
            "The engine's configuration asks for {{ $value }} more workers than the last report has. What these use is "
            "in no number, and no rule watches them."
        ),
    ),
    Alert(
        name="HighwaterReportStale",
        # The second half: an engine that serves, of whose workers nothing was ever read. Its value is 1.
        expr="""(highwater_report_age_seconds > 60
  unless ignoring (state) (highwater_engine_state{{state=~"gone|starting|stuck|not_answering"}} == 1))
or (max without (state) (highwater_engine_state{{state=~"ready|busy|slow|paused"}}) == 1
  unless highwater_report_age_seconds)""",
        holds=5 * MINUTE,
        severity="warning",
        summary=f"The memory of {_WHERE} is not known",
        description=(
            "{{ if eq $value 1.0 }}The engine serves, and its workers' memory was never read. "
            "{{ else }}The last reading of the workers is {{ $value | humanizeDuration }} old. {{ end }}"
            "Until there is a fresh one the policy does nothing, and no number per rank is exported."
        ),
    ),
    Alert(
        name="HighwaterRuleHeld",
        # Of an engine that serves and whose memory is read: a sleeping one's rules are held rightly, and what is stale
        # or gone has an alert of its own. On CPU the default rule is held by design.
        expr="""max without (state) (highwater_policy_state{{state="held"}}) == 1
and ignoring (rule) (max without (state) (highwater_engine_state{{state=~"ready|paused|slow|busy"}}) == 1)
and ignoring (rule) (highwater_ranks_reported > 0)
unless ignoring (rule) count without (rank, device, host) (highwater_device_memory_total_bytes{{device="cpu"}})""",
        holds=HOUR,
        severity="warning",
        summary=f"Rule {{{{ $labels.rule }}}} of {_WHERE} cannot act",
        description=(
            "The engine has served for an hour, and the rule was held all that time: its waters cannot be reached, the "
            "engine's plan leaves too little memory free, or the memory is not known. `GET /policy` says which. "
            "Nothing acts by this rule."
        ),
    ),
    Alert(
        name="HighwaterRemediesTooOften",
        expr="""sum without (remedy, outcome)
  (increase(highwater_policy_actions_total{{outcome=~"done|ineffective|failed"}}[{window}])) > 20""",
        window=HOUR,
        holds=5 * MINUTE,
        severity="warning",
        summary=f"Rule {{{{ $labels.rule }}}} of {_WHERE} gives memory back again and again",
        description=(
            '{{ printf "%.0f" $value }} remedies were run for the rule within an hour. Memory was given back and was '
            "soon taken again. Each remedy makes the engine wait for a moment: the load needs more memory than the "
            "engine leaves free, or the rule's high water is too near to what the engine needs."
        ),
    ),
    Alert(
        name="HighwaterAllocationRetriesRising",
        expr="increase(highwater_torch_alloc_retries_total[{window}]) >= 3",
        holds=5 * MINUTE,
        severity="warning",
        summary=f"Allocations on {_RANK} only succeed at the second try",
        description=(
            '{{ printf "%.0f" $value }} allocations in a quarter of an hour succeeded only after PyTorch had given its '
            "cached blocks back: each stalls the engine, and the next may fail."
        ),
        ranks=True,
    ),
    Alert(
        name="HighwaterOutOfMemory",
        expr="increase(highwater_torch_ooms_total[{window}]) > 0",
        holds=0,
        severity="critical",
        summary=f"An allocation failed for lack of memory on {_RANK}",
        description=(
            "PyTorch's allocator could not get what it asked for. Requests failed, or the engine ended: "
            "`highwater incidents` has what was known at that moment."
        ),
        ranks=True,
    ),
    Alert(
        name="HighwaterIncident",
        # A count that is remembered over a restart does not fall, so that a restart is no burst of new ones.
        expr="increase(highwater_incidents_total[{window}]) > 0",
        holds=0,
        severity="warning",
        summary=f"An incident was written for {_WHERE}: {{{{ $labels.kind }}}}",
        description=(
            "The engine died, hung, ran out of memory or failed to start. `highwater incidents` has what was known at "
            "that moment, what it means and what to change."
        ),
    ),
    Alert(
        name="HighwaterInternalErrors",
        expr="increase(highwater_internal_errors_total[{window}]) > 0",
        holds=0,
        severity="warning",
        summary=f"The sidecar of {_WHERE} met an unexpected exception: {{{{ $labels.part }}}}",
        description=(
            "A part of the sidecar failed and went on. What it was doing then was not done; its log has the exception."
        ),
    ),
    Alert(
        name="HighwaterEncoderCacheAtCapacity",
        # vLLM evicts late: a busy cache is always nearly full. It hurts where requests wait for room in it.
        expr="""highwater_encoder_cache_embeds / highwater_encoder_cache_capacity_embeds >= 0.95
and ignoring (rank, device, host) (highwater_engine_requests_waiting > 0)""",
        holds=15 * MINUTE,
        severity="warning",
        summary=f"The encoder cache of {_RANK} is at capacity and requests wait",
        description=(
            "It holds {{ $value | humanizePercentage }} of what the scheduler lets it hold, and requests have waited "
            "all that time: images may wait for room, or entries that nobody needs may not be let go."
        ),
        ranks=True,
    ),
    Alert(
        name="HighwaterStreamsTruncated",
        # The last line: an engine that died once has cut many at once, and that is another alert's.
        expr=f"""{_OF_SERVER} (increase(highwater_proxy_requests_total{{{{result="truncated"}}}}[{{window}}]))
/ {_OF_SERVER} (increase(highwater_proxy_requests_total{{{{path_class!="health"}}}}[{{window}}])) > 0.01
and {_OF_SERVER} (increase(highwater_proxy_requests_total{{{{result="truncated"}}}}[{{recent}}])) > 0""",
        holds=10 * MINUTE,
        severity="warning",
        summary=f"Responses of {_WHERE} break off",
        description=(
            "For ten minutes responses have begun and not come to their end: {{ $value | humanizePercentage }} of the "
            "requests of a quarter of an hour. Their status is 200, so that no panel of status codes shows it."
        ),
    ),
    Alert(
        name="HighwaterConnectionsRefused",
        expr="""sum without (reason)
  (increase(highwater_proxy_refused_total{{reason="too_many_connections"}}[{recent}])) > 0""",
        holds=5 * MINUTE,
        severity="warning",
        summary=f"Highwater at {_WHERE} refuses connections, because too many are open",
        description=(
            "For five minutes connections have been answered with 503, as more are open than the sidecar may have. "
            "Requests on open connections go on."
        ),
    ),
    Alert(
        name="HighwaterObserveMode",
        # Not `for: 1d`, which a scrape that fails would begin anew.
        expr="""min_over_time(highwater_policy_mode{{mode="observe"}}[{window}]) == 1
and last_over_time(highwater_policy_mode{{mode="observe"}}[{hour}] offset {window}) == 1""",
        window=DAY,
        holds=0,
        severity="info",
        summary=f"The policy of {_WHERE} has only observed for a day",
        description=(
            "It decides and records what it would do, and does nothing: when memory is short, nothing is given back. "
            "This is in order while somebody compares, and forgotten otherwise."
        ),
    ),
    Alert(
        name="HighwaterSidecarDown",
        # No job's name is asked for: a target that had our families is ours.
        expr="up == 0 and on (job, instance) max_over_time(highwater_build_info[{window}])",
        window=7 * DAY,
        holds=5 * MINUTE,
        severity="critical",
        summary=f"Highwater at {_WHERE} cannot be scraped",
        description=(
            "It was there within a week. Clients that go through it get no answers, no rule watches the memory, and "
            "no other alert of this server can fire."
        ),
    ),
    Alert(
        name="HighwaterSidecarsGone",
        # Whoever has never had one is left alone, and who only cannot be scraped has the alert above.
        expr="""count(count by (job, instance) (count_over_time(highwater_build_info[{window}])))
unless on () count(highwater_build_info)
unless on () count(up == 0 and on (job, instance) max_over_time(highwater_build_info[{window}]))""",
        window=DAY,
        holds=15 * MINUTE,
        severity="warning",
        summary="Prometheus knows of no Highwater any more",
        description=(
            "There were {{ $value }} targets within a day, and now there is none, not even one that is down: they were "
            "scaled to nothing, or the scrape does not find them."
        ),
    ),
)
