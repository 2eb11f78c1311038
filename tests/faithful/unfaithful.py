"""Where the controls are known to differ: by control and test, with the reason.

Each entry is an expected failure that must fail, so that the table cannot outlive what it tells. The key is the test's
name, or its name with one case in brackets. What depends on a race within the control begins with ``AT_TIMES``.
"""

AT_TIMES = "at times "

_JSON = "parses every body as JSON, and writes it anew"
_LOSES = "sends on the headers of a list of its own"
_QUERY = "drops the query"
_BUFFERS = "takes the whole body in before it asks the engine"
_SILENT = "closes on a broken stream without what came before"
_END = "ends the connection as if all had come"
_BARE = "takes a bare LF for a line's end, so that what follows is a request"

_NGINX = {
    "test_trailers_of_the_answer_arrive": "drops them",
    "test_ten_megabytes_come_back_as_they_went": AT_TIMES + "stops taking the upload once the answer has begun",
    "test_headers_that_connection_names_end_at_the_proxy": "passes them on",
    "test_an_http_1_0_client_sees_no_early_hints": "takes them for the answer",
    "test_an_engine_that_hangs_up_before_its_answer_is_a_502[after-hints-die]": "takes the hints for the answer",
    "test_an_engine_that_hangs_up_before_its_answer_is_a_502[after-hints-close]": "takes the hints for the answer",
    "test_a_cut_stream_to_an_http_1_0_client_is_no_clean_end": _END,
    "test_errors_have_the_apis_shape": "has pages of its own",
    "test_what_breaks_has_no_clean_end_and_no_sequel[chunk-size-no-hex]": _SILENT,
    "test_what_breaks_has_no_clean_end_and_no_sequel[chunk-size-overflow]": _SILENT,
    "test_what_breaks_has_no_clean_end_and_no_sequel[chunk-end-missing]": _SILENT,
    "test_what_never_ends_is_not_kept[empty-lines]": "takes what is no head for HTTP/0.9",
    "test_a_head_answered_with_a_body_harms_nobody": "waits for the body to end before the next request",
    "test_an_ambiguous_request_is_refused_or_made_plain[bare-lf-head-end]": _BARE,
    "test_an_ambiguous_request_is_refused_or_made_plain[last-chunk-bare-lf]": _BARE,
    "test_an_ambiguous_request_is_refused_or_made_plain[last-chunk-all-bare]": _BARE,
    "test_an_ambiguous_request_is_refused_or_made_plain[trailer-bare-lf]": _BARE,
}

_ROUTER = {
    "test_a_counted_body_is_the_same_bytes_both_ways": _JSON,
    "test_a_json_body_keeps_its_spelling": _JSON,
    "test_a_compressed_upload_stays_compressed": _JSON,
    "test_a_compressed_answer_stays_compressed": _LOSES,
    "test_repeated_headers_stay_repeated_on_the_way_up": _LOSES,
    "test_header_values_keep_their_bytes": _LOSES,
    "test_an_empty_header_value_stays_empty": _LOSES,
    "test_a_head_of_30_kilobytes_passes": _LOSES,
    **{
        f"test_end_to_end_headers_reach_the_engine[{name}]": _LOSES
        for name in (
            "authorization",
            "x-api-key",
            "user-agent",
            "accept",
            "origin",
            "x-data-parallel-rank",
            "x_underscored",
        )
    },
    "test_every_ordinary_method_goes_through[OPTIONS]": "answers 405 itself",
    **{
        f"test_the_target_is_sent_as_the_client_wrote_it[{case}]": _QUERY
        for case in ("plus", "empty-query", "tilde", "escapes", "path-in-query", "long")
    },
    "test_pipelined_requests_are_answered_in_order[gets]": _QUERY,
    "test_pipelined_requests_may_be_cut_at_every_byte[gets]": _QUERY,
    "test_a_redirect_is_the_clients_to_follow": "follows it",
    "test_head_is_answered_with_a_head_alone[counted]": "drops the length",
    "test_early_hints_come_before_the_answer": "drops them",
    "test_early_hints_are_not_held_back": "drops them",
    "test_a_refusal_instead_of_100_continue_reaches_the_client": _BUFFERS,
    "test_trailers_of_the_answer_arrive": "drops them",
    "test_a_chunked_upload_goes_up_as_it_comes": _BUFFERS,
    "test_a_counted_upload_goes_up_as_it_comes": _BUFFERS,
    "test_ten_megabytes_come_back_as_they_went": _JSON,
    "test_headers_that_connection_names_end_at_the_proxy": _LOSES,
    "test_a_cut_stream_to_an_http_1_0_client_is_no_clean_end": _END,
    "test_an_early_error_reaches_a_client_that_still_sends[stays]": _BUFFERS,
    "test_an_early_error_reaches_a_client_that_still_sends[closes]": _BUFFERS,
    "test_a_client_that_leaves_within_its_upload_is_missed_at_once": _BUFFERS,
    "test_a_client_that_leaves_with_requests_waiting_takes_them_along": "looks at nothing while an answer is due",
    "test_errors_have_the_apis_shape": "has texts of its own",
    **{
        f"test_what_is_no_answer_is_a_502[{case}]": "passes a 101 on that nobody asked for"
        for case in ("switching-protocols", "switching-to-nothing", "switching-to-websockets")
    },
    "test_what_breaks_has_no_clean_end_and_no_sequel[chunk-size-overflow]": _SILENT,
    "test_an_answer_before_the_request_is_whole_ends_that_engines_connection": _BUFFERS,
    "test_an_ambiguous_request_is_refused_or_made_plain[te-twice]": "takes any list that ends in chunked for chunked",
    "test_an_ambiguous_request_is_refused_or_made_plain[te-two-fields]": "reads the first alone",
    "test_an_ambiguous_request_is_refused_or_made_plain[te-gzip-first]": "drops the coding that it does not know",
    "test_an_ambiguous_request_is_refused_or_made_plain[bare-lf-head-end]": _BARE,
}

UNFAITHFUL = {
    **{("nginx", test): reason for test, reason in _NGINX.items()},
    **{("vllm-router", test): reason for test, reason in _ROUTER.items()},
}
