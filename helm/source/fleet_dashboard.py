"""The fleet: every server by namespace, model and pod, the one that needs somebody on top."""

from __future__ import annotations

from helm.source.board import Board, label_variable, resets_annotation
from helm.source.panels import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    GREEN,
    ORANGE,
    PER_SECOND,
    RATIO,
    RED,
    SECONDS,
    YELLOW,
    Builder,
    Query,
    series_panel,
    stat_panel,
    states_panel,
    table_panel,
)
from helm.source.server_dashboard import UID as SERVER_UID

UID = "highwater-fleet"
TARGETS = 'namespace=~"$namespace", pod=~"$pod"'
_MODEL = f'on (job, instance) group_left (model) highwater_engine_info{{{TARGETS}, model=~"$model"}}'
_BY = "by (namespace, model, pod, instance)"
_PARTS = "instance_component:highwater_memory_component_bytes:sum"
_LEVELS = ((0, GREEN), (0.9, YELLOW), (0.95, RED))


def of(metric: str, more: str = "") -> str:
    """A family of the servers that are chosen, with the model as a label."""
    return f"{metric}{{{TARGETS}{more}}} * {_MODEL}"


def recorded(record: str, more: str = "") -> str:
    """What the recording rules keep of the servers that are chosen; it has the model already."""
    return f'{record}{{{TARGETS}, model=~"$model"{more}}}'


def _recorded_panel(title: str, text: str, query: Query, *, unit: str, at_most: float | None = None) -> Builder:
    """Over time, a thousand servers' ranks are too much to read: these panels need the recording rules."""
    text += " Needs the recording rules (docs/fleet.md)."
    panel = series_panel(title, text, [query], unit=unit, at_most=at_most)
    return panel.no_value("load helm/alerts/highwater-recording.rules.yaml")


def _seconds_left() -> str:
    free = f"highwater_device_memory_free_bytes{{{TARGETS}}}"
    return f"({free} / (-deriv({free}[15m]) > 0)) * {_MODEL}"


def glance() -> list[Builder]:
    """How many are not well."""
    bad = ((0, GREEN), (1, RED))
    servers = f"count({of('highwater_engine_up')})"
    not_up = f"count({of('highwater_engine_up')} == 0) or vector(0)"
    short = of("highwater_policy_level", ', level=~"short|urgent"')
    observing = of("highwater_policy_mode", ', mode="observe"')
    missing = f"sum({of('highwater_ranks_expected')}) - sum({of('highwater_ranks_reported')})"
    down = "count(up == 0 and on (job, instance) max_over_time(highwater_build_info[7d])) or vector(0)"
    return [
        stat_panel("Servers", "Sidecars that answer.", Query(servers), unit=COUNT, empty="none"),
        stat_panel(
            "Sidecars down",
            "Targets that had Highwater's families within a week and cannot be scraped now.",
            Query(down),
            unit=COUNT,
            steps=bad,
        ),
        stat_panel(
            "Engines not up",
            "Gone, starting, stuck or not answering.",
            Query(not_up),
            unit=COUNT,
            steps=bad,
        ),
        stat_panel(
            "Ranks missing",
            "Workers that should be there and were not heard of.",
            Query(missing),
            unit=COUNT,
            steps=bad,
            empty="not known",
        ),
        stat_panel(
            "Short of memory",
            "Servers that are short of memory by a rule of their policy, urgently or not.",
            Query(f"sum({short})"),
            unit=COUNT,
            steps=((0, GREEN), (1, ORANGE)),
            empty="none",
        ),
        stat_panel(
            "Fullest device",
            "Of all ranks of all servers.",
            Query(f"max({of('highwater_device_memory_used_ratio')})"),
            unit=RATIO,
            steps=_LEVELS,
            empty="no fresh report",
        ),
        stat_panel(
            "First to be full",
            "If the last 15 minutes go on. Empty: none grows.",
            Query(f"min({_seconds_left()})"),
            unit=SECONDS,
            steps=((0, RED), (3600, ORANGE), (6 * 3600, GREEN)),
            empty="not growing",
        ),
        stat_panel(
            "Only observing",
            "Sidecars whose policy decides and does nothing.",
            Query(f"sum({observing})"),
            unit=COUNT,
            steps=((0, GREEN), (1, YELLOW)),
        ),
        states_panel(
            "Alerts",
            "Those that fire, with helm/alerts loaded into this Prometheus. Each has a runbook in docs/runbooks.",
            Query(
                f"max by (alertname, namespace, pod, instance) "
                f'(ALERTS{{{TARGETS}, alertname=~"Highwater.*", alertstate="firing"}})',
                "{{alertname}} {{namespace}} {{pod}} {{instance}}",
            ),
            width=24,
            height=6,
            empty="none",
        ),
    ]


def servers() -> list[Builder]:
    """All of them, one a row."""
    encoder = of("highwater_encoder_cache_bytes", ', residency="device"')
    short = of("highwater_policy_short_bytes")
    state = f"(highwater_engine_state{{{TARGETS}}} == 1)"
    columns = [
        Query(f"max by (namespace, model, pod, instance, state) ({state} * {_MODEL})"),
        Query(f"max {_BY} ({of('highwater_device_memory_used_ratio')})", column="Used, worst rank"),
        Query(f"min {_BY} ({of('highwater_device_memory_free_bytes')})", column="Headroom"),
        Query(f"min {_BY} ({_seconds_left()})", column="Time to the limit"),
        Query(f"max {_BY} ({of('highwater_growth_bytes')})", column="Growth since ready"),
        Query(f"sum {_BY} ({encoder})", column="Encoder cache"),
        Query(f"max {_BY} ({short})", column="Short by"),
        Query(
            f"max {_BY} ({of('highwater_ranks_expected')} - {of('highwater_ranks_reported')})", column="Ranks missing"
        ),
        Query(f"max {_BY} ({of('highwater_engine_requests_running')})", column="Running"),
        Query(f"max {_BY} ({of('highwater_engine_requests_waiting')})", column="Waiting"),
        Query(f"max {_BY} ({of('highwater_report_age_seconds')})", column="Report age"),
    ]
    order = ["namespace", "model", "pod", "instance", "state", *(query.column for query in columns if query.column)]
    link = (
        f"/d/{SERVER_UID}?var-instance=${{__data.fields.instance}}&var-datasource=${{datasource}}&${{__url_time_range}}"
    )
    return [
        table_panel(
            "Servers",
            "One row for each; the fullest on top. A click on the instance opens it.",
            columns,
            units={
                "Used, worst rank": RATIO,
                "Headroom": BYTES,
                "Time to the limit": SECONDS,
                "Growth since ready": BYTES,
                "Encoder cache": BYTES,
                "Short by": BYTES,
                "Report age": SECONDS,
            },
            steps={
                "Used, worst rank": _LEVELS,
                "Time to the limit": ((0, RED), (3600, ORANGE), (6 * 3600, GREEN)),
                "Short by": ((0, GREEN), (1, ORANGE)),
                "Ranks missing": ((0, GREEN), (1, RED)),
                "Report age": ((0, GREEN), (15, YELLOW), (60, RED)),
            },
            links={"instance": link},
            order=order,
            sort_by="Used, worst rank",
        )
    ]


def over_time() -> list[Builder]:
    """The same over time, by what they serve."""
    name = "{{namespace}} {{pod}} {{instance}}"
    rate = "[$__rate_interval]"
    freed = f"sum by (remedy) (rate(highwater_reset_freed_bytes_total{{{TARGETS}}}{rate}) * {_MODEL})"
    errors = f"sum by (namespace, model) (rate(highwater_proxy_upstream_errors_total{{{TARGETS}}}{rate}) * {_MODEL})"
    return [
        _recorded_panel(
            "Used share, worst rank of each server",
            "How full the fullest device of each server is.",
            Query(f"max {_BY} ({recorded('instance:highwater_device_memory_used_ratio:max')})", name),
            unit=RATIO,
            at_most=1,
        ),
        series_panel(
            "Growth since ready, by server",
            "Over the ranks of each. One that grows unlike the others of its model is worth a look.",
            [Query(f"max {_BY} ({of('highwater_growth_bytes')})", name)],
            unit=BYTES,
            at_least=None,
        ),
        _recorded_panel(
            "Memory by model and component",
            "Over all ranks of all servers of a model.",
            Query(f"sum by (model, component) ({recorded(_PARTS)})", "{{model}}: {{component}}"),
            unit=BYTES,
        ),
        _recorded_panel(
            "Encoder cache by model",
            "On the devices, over all ranks.",
            Query("sum by (model) ({})".format(recorded(_PARTS, ', component="encoder_cache"')), "{{model}}"),
            unit=BYTES,
        ),
        series_panel(
            "Requests by model",
            "Running and waiting, over all servers of a model.",
            [
                Query(f"sum by (model) ({of('highwater_engine_requests_running')})", "{{model}} running"),
                Query(f"sum by (model) ({of('highwater_engine_requests_waiting')})", "{{model}} waiting"),
            ],
            unit=COUNT,
        ),
        series_panel(
            "Remedies by outcome",
            "Since each sidecar started, by namespace and model.",
            [
                Query(
                    f"sum by (namespace, model, outcome) ({of('highwater_resets_total')})",
                    "{{namespace}} {{model}} {{outcome}}",
                )
            ],
            unit=COUNT,
        ),
        series_panel(
            "Freed by remedies",
            "Bytes that each remedy gives back each second, over the fleet.",
            [Query(freed, "{{remedy}}")],
            unit=BYTES_PER_SECOND,
        ),
        series_panel(
            "Requests that engines failed",
            "Each second, as the proxies see it.",
            [Query(errors, "{{namespace}} {{model}}")],
            unit=PER_SECOND,
        ),
    ]


def fleet_dashboard() -> str:
    """The dashboard of many servers, as JSON."""
    text = (
        "Every server with Highwater beside it, by namespace, model and pod. `namespace` and `pod` are labels that the "
        "scrape adds (docs/grafana.md); without them all servers are still here, by instance."
    )
    board = Board(UID, "Highwater / Fleet", text)
    board.variables(
        label_variable("namespace", "Namespace", "highwater_build_info", "Kubernetes namespace, from the scrape."),
        label_variable("model", "Model", 'highwater_engine_info{namespace=~"$namespace"}', "As the engine serves it."),
        label_variable("pod", "Pod", 'highwater_build_info{namespace=~"$namespace"}', "Pod, from the scrape."),
    )
    board.annotations(resets_annotation("Resets that failed", f'{TARGETS}, outcome="failed"', RED))
    board.row("At a glance", glance())
    board.row("Servers", servers())
    board.row("Over time", over_time())
    return board.json()
