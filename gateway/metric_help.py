"""What each metric of ``/metrics`` means: the HELP lines. Names are SGLang's where it has one."""

from __future__ import annotations

ENGINE = {
    "engine_ready": "1 while a worker is ready, else 0",
    "num_running_reqs": "Requests that run",
    "num_queue_reqs": "Requests that wait",
    "max_total_num_tokens": "Tokens the KV pool holds",
    "num_used_tokens": "Tokens whose KV pages requests hold",
    "token_usage": "Share of the KV pool that requests hold, 0 to 1",
    "num_used_pages": "KV pages that requests hold",
    "num_free_pages": "KV pages that nobody holds and nothing is cached in",
    "num_cached_tokens": "Tokens in the prefix cache, those in use included",
    "num_evicted_tokens": "Tokens evicted from the prefix cache",
    "cache_hit_rate": "Share of all prompt tokens so far that were found in the cache, 0 to 1",
    "prompt_tokens": "Prompt tokens of the requests admitted, those found in the cache included",
    "cached_tokens": "Prompt tokens found in the cache",
    "generation_tokens": "Tokens generated",
    "num_requests": "Requests that came to the scheduler and were not refused",
    "num_preemptions": "Times a running request gave its pages to others",
    "num_steps": "Forward steps of the worker",
    "spec_decode_num_draft_tokens": "Tokens computed in the hope that they would be drawn",
    "spec_decode_num_accepted_tokens": "Of these, tokens that were",
    "num_prefill_tokens": "Prompt tokens computed",
    "num_bad_frames": "Frames and connections refused by the engine's inboxes",
    "num_invariant_failures": "Times the bookkeeping of KV pages did not add up",
    "num_finished_requests": "Requests that ended, by finish reason",
    "num_aborted_requests": "Requests ended from outside or never begun, by cause",
    "num_failed_requests": "Requests the engine could not go on with, by error code",
    "step_time_seconds": "Duration of a forward step, from its start in the worker to its end",
    "queue_time_seconds": "From a request's arrival at the scheduler to its first admission",
    "process_generation": "Starts of each process after the first",
}
GATEWAY = {
    "gateway_aborted_requests": "Requests a gateway asked the engine to abort",
    "gateway_resubmitted_requests": "Requests a gateway submitted again after a process died",
    "gateway_output_tokens": "Tokens that came to a gateway",
    "gateway_cut_off_clients": "Clients cut off because they did not read",
    "gateway_bad_frames": "Messages to a gateway that could not be decoded",
    "gateway_open_requests": "Requests open in a gateway",
    "gateway_connections": "HTTP connections open in a gateway",
    "http_replies": "HTTP replies by status",
    "time_to_first_token_seconds": "Request received to first content written",
    "inter_token_latency_seconds": "Between two content writes of one choice",
    "e2e_request_latency_seconds": "Request received to last byte written",
}
UNKNOWN = "Told by an engine newer than this gateway"
