"""The operator's dashboard: one server, from "is it well" down to what the proxy sees."""

from __future__ import annotations

from helm.source.board import Board, label_variable, resets_annotation
from helm.source.panels import (
    BLUE,
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
)

UID = "highwater-server"
SERVER = 'namespace=~"$namespace", instance=~"$instance"'
RANKS = f'{SERVER}, rank=~"$rank"'
HOUR = 3600
# A rule's high water as bytes of a device, lowest first where several rules watch it.
_DEVICE_RULE = 'highwater_policy_rule_info{{{server}, signal="{signal}"}}'


def _of_rule(metric: str, signal: str) -> str:
    """A family of the rules that watch a signal."""
    rule = _DEVICE_RULE.format(server=SERVER, signal=signal)
    return f"{metric}{{{SERVER}}} and on (job, instance, rule) {rule}"


def _high_water() -> str:
    """Where the rules about devices act, as used bytes of each."""
    total = f"highwater_device_memory_total_bytes{{{RANKS}}}"
    at_ratio = f"min by (job, instance) ({_of_rule('highwater_policy_high_water_ratio', 'device_used_ratio')})"
    at_free = f"max by (job, instance) ({_of_rule('highwater_policy_high_water_bytes', 'device_free_bytes')})"
    return (
        f"({total} * on (job, instance) group_left () {at_ratio})\n"
        f"or ({total} - on (job, instance) group_left () {at_free})"
    )


def _seconds_left() -> str:
    """As the sidecar reckons it; nothing where no device fills."""
    return f"highwater_device_memory_seconds_to_full{{{RANKS}}}"


def glance() -> list[Builder]:
    """What to know first, worst rank or oldest where there are several."""
    engine = Query(f"max by (state) (highwater_engine_state{{{SERVER}}}) == 1", "{{state}}")
    policy = Query(f"max by (level) (highwater_policy_level{{{SERVER}}}) == 1", "{{level}}")
    missing = Query(f"sum(highwater_ranks_expected{{{SERVER}}}) - sum(highwater_ranks_reported{{{SERVER}}})")
    levels = ((0, GREEN), (0.9, YELLOW), (0.95, RED))
    left = ((0, RED), (HOUR, ORANGE), (6 * HOUR, GREEN))
    return [
        stat_panel("Engine", "The state that the engine is in.", engine, unit="none", names=True, empty="no sidecar"),
        stat_panel(
            "Ranks missing",
            "Workers that should be there and were not heard of.",
            missing,
            unit=COUNT,
            steps=((0, GREEN), (1, RED)),
            empty="not known",
        ),
        stat_panel(
            "Used, worst rank",
            "How full the fullest device is.",
            Query(f"max(highwater_device_memory_used_ratio{{{RANKS}}})"),
            unit=RATIO,
            steps=levels,
            empty="no fresh report",
        ),
        stat_panel(
            "Headroom, worst rank",
            "What the device with the least of it has left.",
            Query(f"min(highwater_device_memory_free_bytes{{{RANKS}}})"),
            unit=BYTES,
            steps=((0, RED), (512 * 2**20, YELLOW), (2 * 2**30, GREEN)),
            empty="no fresh report",
        ),
        stat_panel(
            "Time to the limit",
            "When the first device is full if the last 15 minutes go on. Empty: it does not grow.",
            Query(f"min({_seconds_left()})"),
            unit=SECONDS,
            steps=left,
            empty="not growing",
        ),
        stat_panel(
            "Encoder cache, all ranks",
            "Encoder outputs on the devices: vLLM frees them late, and no reset of the KV or processor caches does.",
            Query(f'sum(highwater_encoder_cache_bytes{{{RANKS}, residency="device"}})'),
            unit=BYTES,
            steps=((0, BLUE),),
            empty="none",
        ),
        stat_panel("Policy", "How memory stands by the policy's worst rule.", policy, unit="none", names=True),
        stat_panel(
            "Report age",
            "How old the numbers of the workers are. An idle engine's are asked for every five seconds.",
            Query(f"max(highwater_report_age_seconds{{{SERVER}}})"),
            unit=SECONDS,
            steps=((0, GREEN), (15, YELLOW), (60, RED)),
            empty="never read",
        ),
        states_panel(
            "Alerts",
            "Those that fire, with helm/alerts loaded into this Prometheus. Each has a runbook in docs/runbooks.",
            Query(
                f'max by (alertname, rank) (ALERTS{{{SERVER}, alertname=~"Highwater.*", alertstate="firing"}})',
                "{{alertname}} {{rank}}",
            ),
            width=24,
            height=4,
            empty="none",
        ),
    ]


def where() -> list[Builder]:
    """Where the memory is."""
    parts = Query(f"sum by (component) (highwater_memory_component_bytes{{{RANKS}}})", "{{component}}")
    total = Query(f"sum(highwater_device_memory_total_bytes{{{RANKS}}})", "total", line=RED)
    high = Query(f"sum({_high_water()})", "high water", line=ORANGE)
    stack = series_panel(
        "Memory of rank $rank",
        "The parts of what is used, one upon the other, under the device's total and the rules' high water. What one "
        "rank holds beyond the others is the row further down.",
        [parts, total, high],
        unit=BYTES,
        stacked=True,
        width=24,
        height=10,
    )
    used = f"highwater_device_memory_used_ratio{{{RANKS}}}"
    waters = {
        signal: [
            Query(_of_rule(f"highwater_policy_{water}_water_{unit}", signal), f"{water} water of {{{{rule}}}}")
            for water in ("high", "low")
        ]
        for signal, unit in (("device_used_ratio", "ratio"), ("device_free_bytes", "bytes"))
    }
    return [
        stack.repeat("rank").repeat_direction("h").max_per_row(4),
        series_panel(
            "Used share by rank",
            "How full each device is, with the waters of the rules that watch this share.",
            [Query(used, "rank {{rank}} {{device}}"), *waters["device_used_ratio"]],
            unit=RATIO,
            at_most=1,
        ),
        series_panel(
            "Headroom by rank",
            "What each device has left, with the waters of the rank that is worst off; on CPU what the worker could "
            "still get.",
            [
                Query(f"highwater_device_memory_free_bytes{{{RANKS}}}", "rank {{rank}} {{device}}"),
                *waters["device_free_bytes"],
            ],
            unit=BYTES,
        ),
        series_panel(
            "All devices",
            "Each counted once, also where ranks share one.",
            [
                Query(f"highwater_devices_memory_used_bytes{{{SERVER}}}", "used"),
                Query(f"highwater_devices_memory_total_bytes{{{SERVER}}}", "total", line=RED),
            ],
            unit=BYTES,
        ),
        stat_panel(
            "Devices",
            "What they are, with the identity by which the vendor's exporter knows them.",
            Query(f"max by (product, uuid) (highwater_device_info{{{RANKS}}})", "{{product}} {{uuid}}"),
            unit="none",
            names=True,
            empty="unknown",
            width=12,
        ),
    ]


def load() -> list[Builder]:
    """Requests on the same time axis: growth with traffic is one thing, growth without is another."""
    return [
        series_panel(
            "Requests",
            "What the engine computes and what waits for it.",
            [
                Query(f"highwater_engine_requests_running{{{SERVER}}}", "running"),
                Query(f"highwater_engine_requests_waiting{{{SERVER}}}", "waiting"),
            ],
            unit=COUNT,
        ),
        series_panel(
            "KV cache usage",
            "Its bytes are preallocated: a full one makes requests wait, and takes no more of the device.",
            [Query(f"highwater_engine_kv_cache_usage_ratio{{{SERVER}}}", "KV cache")],
            unit=RATIO,
            at_most=1,
        ),
    ]


def growth() -> list[Builder]:
    """Whether it grows, and until when there is room."""
    return [
        series_panel(
            "Growth since ready",
            "Over all ranks. After the first images a plateau is in order; a slope that stays is not.",
            [Query(f"highwater_growth_bytes{{{SERVER}}}", "growth")],
            unit=BYTES,
            width=8,
            at_least=None,
        ),
        series_panel(
            "Slope",
            "Of the last minute as the sidecar sees it, and of the last 15 minutes over all ranks.",
            [
                Query(f"highwater_growth_bytes_per_second{{{SERVER}}}", "last minute"),
                Query(f"sum(deriv(highwater_device_memory_used_bytes{{{RANKS}}}[15m]))", "last 15 minutes"),
            ],
            unit=BYTES_PER_SECOND,
            width=8,
            at_least=None,
        ),
        series_panel(
            "Time to the limit",
            "When each device is full if the last 15 minutes go on. No line: it does not grow.",
            [Query(_seconds_left(), "rank {{rank}}")],
            unit=SECONDS,
            width=8,
        ),
    ]


def encoder_cache() -> list[Builder]:
    """The usual place of growth under images."""
    return [
        series_panel(
            "Encoder cache bytes",
            "By residency: what a trim moved away lies in host memory until it is used again.",
            [Query(f"sum by (residency) (highwater_encoder_cache_bytes{{{RANKS}}})", "{{residency}}")],
            unit=BYTES,
            stacked=True,
            width=6,
        ),
        series_panel(
            "Encoder cache entries",
            "Of the rank that holds most: every tensor-parallel rank holds a copy.",
            [Query(f"max by (residency) (highwater_encoder_cache_entries{{{RANKS}}})", "{{residency}}")],
            unit=COUNT,
            stacked=True,
            width=6,
        ),
        series_panel(
            "Encoder cache fill",
            "vLLM evicts late, so that a busy cache stays near 100 %: that is a problem only while requests wait.",
            [
                Query(
                    f"highwater_encoder_cache_embeds{{{RANKS}}} / highwater_encoder_cache_capacity_embeds{{{RANKS}}}",
                    "rank {{rank}}",
                )
            ],
            unit=RATIO,
            steps=((0, GREEN), (0.95, ORANGE)),
            width=6,
            at_most=1,
        ),
        series_panel(
            "Oldest entry",
            "Old entries in a cache that holds much: nobody needs them any more.",
            [Query(f"highwater_encoder_cache_oldest_age_seconds{{{RANKS}}}", "rank {{rank}}")],
            unit=SECONDS,
            width=6,
        ),
        series_panel(
            "Trims and what they cost",
            "Entries that were moved away and brought back each second. Many that come back: low water is too low.",
            [
                Query(f"sum(rate(highwater_encoder_cache_spills_total{{{RANKS}}}[$__rate_interval]))", "moved away"),
                Query(f"sum(rate(highwater_encoder_cache_restores_total{{{RANKS}}}[$__rate_interval]))", "came back"),
            ],
            unit=PER_SECOND,
        ),
        series_panel(
            "Steps held up by entries that came back",
            "The share of time in which steps waited for encoder outputs to be brought back, by rank.",
            [
                Query(
                    f"rate(highwater_encoder_cache_restore_seconds_total{{{RANKS}}}[$__rate_interval])", "rank {{rank}}"
                )
            ],
            unit=RATIO,
        ),
    ]


def policy() -> list[Builder]:
    """What was done about it, and what that gave back."""
    by_remedy = "sum by (remedy, le)"
    held = f"rate(highwater_reset_hold_seconds_bucket{{{SERVER}}}[$__rate_interval])"
    took = f"rate(highwater_reset_duration_seconds_bucket{{{SERVER}}}[$__rate_interval])"
    return [
        states_panel(
            "Rules over time",
            "Short or urgent for long: nothing here can be given back, or it does not help. Held: the rule cannot act.",
            Query(f"max by (rule, state) (highwater_policy_state{{{SERVER}}})", "{{rule}}: {{state}}"),
            height=8,
        ),
        series_panel(
            "How near each rule is to its high water",
            "The signal over its high water; at 100 % the rule acts (of free bytes: under it).",
            [
                Query(
                    f"highwater_policy_signal_{unit}{{{SERVER}}} / highwater_policy_high_water_{unit}{{{SERVER}}}",
                    "{{rule}}",
                )
                for unit in ("bytes", "ratio")
            ],
            unit=RATIO,
            steps=((0, GREEN), (1, RED)),
        ),
        series_panel(
            "Short of low water by rank",
            "What must be given back to reach low water, once high water is crossed; 0 before.",
            [Query(f"highwater_policy_short_bytes{{{SERVER}}}", "{{rule}}: rank {{rank}}")],
            unit=BYTES,
        ),
        series_panel(
            "Remedies by the policy within the last hour",
            "By rule and by what came of them; many of them are HighwaterRemediesTooOften.",
            [
                Query(f"highwater_policy_actions_last_hour{{{SERVER}}}", "started"),
                Query(
                    f"sum by (rule, remedy, outcome) (increase(highwater_policy_actions_total{{{SERVER}}}[1h]))",
                    "{{rule}}: {{remedy}} {{outcome}}",
                ),
            ],
            unit=COUNT,
        ),
        series_panel(
            "Remedies",
            "Since the sidecar started, by what came of them. In observe mode they are only observed.",
            [
                Query(
                    f"sum by (remedy, trigger, outcome) (highwater_resets_total{{{SERVER}}})",
                    "{{remedy}} {{outcome}} ({{trigger}})",
                )
            ],
            unit=COUNT,
        ),
        series_panel(
            "Freed by remedies",
            "Since the sidecar started, by remedy and by the component that it came from.",
            [
                Query(
                    f"sum by (remedy, component) (highwater_reset_freed_bytes_total{{{SERVER}}}) > 0",
                    "{{remedy}}: {{component}}",
                )
            ],
            unit=BYTES,
        ),
        series_panel(
            "Duration of a remedy, 90 %",
            "From its start to the reading after it.",
            [Query(f"histogram_quantile(0.9, {by_remedy} ({took}))", "{{remedy}}")],
            unit=SECONDS,
        ),
        series_panel(
            "How long requests were held, 90 %",
            "At the gate, while a remedy runs that needs it.",
            [Query(f"histogram_quantile(0.9, {by_remedy} ({held}))", "{{remedy}}")],
            unit=SECONDS,
        ),
        series_panel(
            "Mode",
            "1 for the mode that the policy is in: in observe it decides and records, and does nothing.",
            [Query(f"max by (mode) (highwater_policy_mode{{{SERVER}}})", "{{mode}}")],
            unit="none",
            at_most=1,
            height=5,
        ),
        series_panel(
            "Engine restarts",
            "Starts of the engine that the sidecar saw after the first.",
            [Query(f"max(highwater_engine_restarts_total{{{SERVER}}})", "restarts")],
            unit="none",
            height=5,
        ),
        states_panel(
            "Engine over time",
            "The sidecar itself pauses no engine: paused is somebody else's doing.",
            Query(f"max by (state) (highwater_engine_state{{{SERVER}}})", "{{state}}"),
        ),
    ]


def allocator_and_host() -> list[Builder]:
    """What PyTorch keeps, what ranks do not share, and the host's side."""
    used = f"highwater_device_memory_used_bytes{{{RANKS}}}"
    spread = "without (rank, device, host)"
    return [
        series_panel(
            "Reserved minus allocated",
            "What PyTorch's allocator keeps and no tensor uses, and what of it `release` would give back. The rest is "
            "fragments and captured graphs' memory; much of it beside failures is fragmentation.",
            [
                Query(
                    f"highwater_torch_reserved_bytes{{{RANKS}}} - highwater_torch_allocated_bytes{{{RANKS}}}",
                    "rank {{rank}}",
                ),
                Query(f"highwater_device_releasable_bytes{{{RANKS}}}", "releasable on rank {{rank}}"),
            ],
            unit=BYTES,
            width=8,
        ),
        series_panel(
            "Peak allocated",
            "The highest so far, and what is reserved now.",
            [
                Query(f"highwater_torch_peak_allocated_bytes{{{RANKS}}}", "peak of rank {{rank}}"),
                Query(f"highwater_torch_reserved_bytes{{{RANKS}}}", "reserved by rank {{rank}}"),
            ],
            unit=BYTES,
            width=8,
        ),
        series_panel(
            "Allocations that had to retry or failed",
            "In the last quarter of an hour. A retry costs a stall; a failure ends requests or the engine.",
            [
                Query(f"increase(highwater_torch_alloc_retries_total{{{RANKS}}}[15m])", "retries of rank {{rank}}"),
                Query(f"increase(highwater_torch_ooms_total{{{RANKS}}}[15m])", "failures of rank {{rank}}"),
            ],
            unit=COUNT,
            width=8,
            bars=True,
        ),
        series_panel(
            "Skew between ranks",
            "Used on the fullest device less used on the emptiest: one rank alone runs out of memory for all.",
            [Query(f"max {spread} ({used}) - min {spread} ({used})", "skew")],
            unit=BYTES,
            width=8,
        ),
        series_panel(
            "Host memory",
            "What is used of what the workers live in. The multimodal processor cache and trimmed entries are here.",
            [Query(f"highwater_host_memory_used_ratio{{{RANKS}}}", "rank {{rank}}")],
            unit=RATIO,
            steps=((0, GREEN), (0.9, RED)),
            width=8,
            at_most=1,
        ),
        series_panel(
            "Worker RSS",
            "Of each worker's process, and what of it PyTorch keeps locked in place for copies.",
            [
                Query(f"highwater_host_memory_rss_bytes{{{RANKS}}}", "rank {{rank}}"),
                Query(f"highwater_host_memory_pinned_bytes{{{RANKS}}}", "pinned by rank {{rank}}"),
            ],
            unit=BYTES,
            width=8,
        ),
    ]


def proxy() -> list[Builder]:
    """What clients see."""
    rate = "[$__rate_interval]"
    ended = "highwater_proxy_requests_total"
    first_byte, duration = "highwater_proxy_time_to_first_byte_seconds", "highwater_proxy_request_duration_seconds"
    bucket = f"sum by (le) (rate({first_byte}_bucket{{{SERVER}}}{rate}))"

    def by_class(histogram: str, at: float) -> Query:
        buckets = f"sum by (path_class, le) (rate({histogram}_bucket{{{SERVER}}}{rate}))"
        return Query(f"histogram_quantile({at}, {buckets})", f"{{{{path_class}}}} {at:.0%}")

    return [
        series_panel(
            "Requests through the proxy",
            "By path and status.",
            [Query(f"sum by (path_class, code) (rate({ended}{{{SERVER}}}{rate}))", "{{path_class}} {{code}}")],
            unit="reqps",
            width=8,
        ),
        series_panel(
            "Share of answers with 5xx",
            "Of all that ended, the engine's own included.",
            [
                Query(
                    f'(sum(rate({ended}{{{SERVER}, code=~"5.."}}{rate})) or vector(0))\n'
                    f"/ (sum(rate({ended}{{{SERVER}}}{rate})) > 0)",
                    "5xx",
                )
            ],
            unit=RATIO,
            width=8,
            at_most=1,
        ),
        series_panel(
            "Time to the first byte",
            "Of a streamed answer this is the first token's.",
            [Query(f"histogram_quantile({at}, {bucket})", f"{at:.0%}") for at in (0.5, 0.9, 0.99)],
            unit=SECONDS,
            width=8,
        ),
        series_panel(
            "Time to the first byte, by path",
            "Probes are in none of these.",
            [by_class(first_byte, at) for at in (0.5, 0.95)],
            unit=SECONDS,
            width=8,
        ),
        series_panel(
            "Duration, by path",
            "From the request's head to the end of its response: of a stream, its last token.",
            [by_class(duration, at) for at in (0.5, 0.95)],
            unit=SECONDS,
            width=8,
        ),
        series_panel(
            "How requests ended",
            "Each second. Truncated: the response began and broke off, whatever its status says.",
            [Query(f"sum by (result) (rate({ended}{{{SERVER}}}{rate}))", "{{result}}")],
            unit=PER_SECOND,
            width=8,
        ),
        series_panel(
            "Requests under way and held",
            "Held: they wait for a reset to end.",
            [
                Query(f"highwater_proxy_requests_in_flight{{{SERVER}}}", "under way"),
                Query(f"highwater_proxy_requests_held{{{SERVER}}}", "held"),
            ],
            unit=COUNT,
            width=8,
        ),
        series_panel(
            "Requests that the engine failed",
            "By reason, each second.",
            [Query(f"sum by (reason) (rate(highwater_proxy_upstream_errors_total{{{SERVER}}}{rate}))", "{{reason}}")],
            unit=PER_SECOND,
            width=8,
        ),
        series_panel(
            "Requests shed, clients that left",
            "Each second. Shed: answered with 503 while requests were held for a reset.",
            [
                Query(
                    f"sum by (reason) (rate(highwater_proxy_requests_shed_total{{{SERVER}}}{rate}))", "shed: {{reason}}"
                ),
                Query(f"sum(rate(highwater_proxy_client_disconnects_total{{{SERVER}}}{rate}))", "clients that left"),
            ],
            unit=PER_SECOND,
            width=8,
        ),
        series_panel(
            "Refused by the sidecar",
            "Each second, by reason. Forbidden: control paths of the engine, which no client has a use for.",
            [
                Query(f"sum by (reason) (rate(highwater_proxy_refused_total{{{SERVER}}}{rate}))", "{{reason}}"),
                Query(
                    f"sum by (reason) (rate(highwater_control_denied_total{{{SERVER}}}{rate}))",
                    "control call: {{reason}}",
                ),
            ],
            unit=PER_SECOND,
            width=8,
        ),
        series_panel(
            "Connections",
            "Of clients, and to the engine. Many of clients beside few requests under way: they are idle.",
            [
                Query(f"highwater_proxy_connections{{{SERVER}}}", "clients"),
                Query(f"highwater_proxy_engine_connections{{{SERVER}}}", "engine, {{state}}"),
                Query(f"highwater_proxy_tunnels{{{SERVER}}}", "WebSockets"),
            ],
            unit=COUNT,
            width=8,
        ),
        series_panel(
            "Requests to the engine, by connection",
            "Each second. Mostly new ones under steady traffic: the engine closes connections early.",
            [
                Query(
                    f"sum by (connection) (rate(highwater_proxy_engine_requests_total{{{SERVER}}}{rate}))",
                    "{{connection}} connection",
                ),
                Query(f"sum(rate(highwater_proxy_retries_total{{{SERVER}}}{rate}))", "sent once more"),
            ],
            unit=PER_SECOND,
            width=8,
        ),
        series_panel(
            "Bytes through the proxy",
            "Each second, counted when a request ends.",
            [
                Query(
                    f"sum by (path_class) (rate(highwater_proxy_request_bytes_total{{{SERVER}}}{rate}))",
                    "{{path_class}}, received",
                ),
                Query(
                    f"sum by (path_class) (rate(highwater_proxy_response_bytes_total{{{SERVER}}}{rate}))",
                    "{{path_class}}, sent",
                ),
            ],
            unit=BYTES_PER_SECOND,
            width=8,
        ),
    ]


def sidecar() -> list[Builder]:
    """Whether the numbers above can be believed."""
    rate = "[$__rate_interval]"
    bucket = f"sum by (le) (rate(highwater_poll_duration_seconds_bucket{{{SERVER}}}{rate}))"
    return [
        series_panel(
            "Report age",
            "Once it is stale the families per rank are gone, and the policy does nothing.",
            [Query(f"highwater_report_age_seconds{{{SERVER}}}", "age")],
            unit=SECONDS,
            width=6,
        ),
        series_panel(
            "Ranks",
            "Heard of, of those that there should be.",
            [
                Query(f"highwater_ranks_reported{{{SERVER}}}", "reported"),
                Query(f"highwater_ranks_expected{{{SERVER}}}", "expected", line=RED),
            ],
            unit=COUNT,
            width=6,
        ),
        series_panel(
            "Poll duration",
            "Of one round of questions to the engine and its workers.",
            [Query(f"histogram_quantile({at}, {bucket})", f"{at:.0%}") for at in (0.5, 0.99)],
            unit=SECONDS,
            width=6,
        ),
        series_panel(
            "Poll failures",
            "Each second, by source and reason.",
            [
                Query(
                    f"sum by (source, reason) (rate(highwater_poll_failures_total{{{SERVER}}}{rate}))",
                    "{{source}}: {{reason}}",
                )
            ],
            unit=PER_SECOND,
            width=6,
        ),
        series_panel(
            "Lines that the access log lost",
            "Each second; only where `access_log` is set.",
            [Query(f"sum(rate(highwater_access_log_lines_dropped_total{{{SERVER}}}{rate}))", "lost")],
            unit=PER_SECOND,
            width=6,
        ),
        series_panel(
            "Incidents and internal errors",
            "Within a quarter of an hour. `highwater incidents` shows the first, the sidecar's log the others.",
            [
                Query(f"increase(highwater_incidents_total{{{SERVER}}}[15m])", "incident: {{kind}}"),
                Query(f"increase(highwater_internal_errors_total{{{SERVER}}}[15m])", "internal error: {{part}}"),
            ],
            unit=COUNT,
            width=6,
        ),
    ]


def engine() -> list[Builder]:
    """The engine's own families, where one scrape brings both."""
    rate = "[$__rate_interval]"

    def hits(cache: str) -> str:
        hit, asked = f"vllm:{cache}_cache_hits_total", f"vllm:{cache}_cache_queries_total"
        return f"sum(rate({hit}{{{SERVER}}}{rate})) / (sum(rate({asked}{{{SERVER}}}{rate})) > 0)"

    return [
        series_panel(
            "Requests by engine",
            "Of each data-parallel engine, as vLLM counts them.",
            [
                Query(f"vllm:num_requests_running{{{SERVER}}}", "running on {{engine}}"),
                Query(f"vllm:num_requests_waiting{{{SERVER}}}", "waiting for {{engine}}"),
            ],
            unit=COUNT,
            width=6,
        ),
        series_panel(
            "KV cache usage by engine",
            "As vLLM counts it.",
            [Query(f"vllm:kv_cache_usage_perc{{{SERVER}}}", "{{engine}}")],
            unit=RATIO,
            width=6,
            at_most=1,
        ),
        series_panel(
            "Hits of the prefix and multimodal caches",
            "What a reset of them costs shows here.",
            [Query(hits("prefix"), "prefix cache"), Query(hits("mm"), "multimodal processor cache")],
            unit=RATIO,
            width=6,
            at_most=1,
        ),
        series_panel(
            "Tokens",
            "Each second.",
            [
                Query(f"sum(rate(vllm:prompt_tokens_total{{{SERVER}}}{rate}))", "prompt"),
                Query(f"sum(rate(vllm:generation_tokens_total{{{SERVER}}}{rate}))", "generated"),
                Query(f"sum(rate(vllm:num_preemptions_total{{{SERVER}}}{rate}))", "preemptions"),
            ],
            unit=PER_SECOND,
            width=6,
        ),
    ]


def server_dashboard() -> str:
    """The dashboard of one server, as JSON."""
    text = (
        "Where the memory of one vLLM server is, whether it grows, what was reset and what that gave back. "
        "docs/grafana.md tells how to load and scrape; docs/metrics.md what each metric means."
    )
    board = Board(UID, "Highwater / Server", text)
    server = f"{{{SERVER}}}"
    board.variables(
        label_variable("namespace", "Namespace", "highwater_build_info", "Kubernetes namespace, from the scrape."),
        label_variable(
            "instance",
            "Server",
            'highwater_build_info{namespace=~"$namespace"}',
            "The sidecar's address, as Prometheus scrapes it.",
            multi=False,
        ),
        label_variable("rank", "Rank", f"highwater_device_memory_used_bytes{server}", "Workers of this server."),
    )
    done, other = f'{SERVER}, outcome="done"', f'{SERVER}, outcome!="done"'
    board.annotations(
        resets_annotation("Resets", done, GREEN),
        resets_annotation("Resets refused, failed or observed", other, YELLOW),
    )
    board.row("At a glance", glance())
    board.row("Where the memory is", where())
    board.row("Load", load())
    board.row("Growth", growth())
    board.row("Encoder cache", encoder_cache())
    board.row("Policy and resets", policy())
    board.row("Allocator, ranks and host", allocator_and_host())
    board.row("Proxy", proxy())
    board.row("The sidecar", sidecar())
    board.row("The engine's own families (scrape /metrics?engine=1)", engine())
    return board.json()
