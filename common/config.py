"""Every setting of the server: names, groups, defaults and help, in one place.

``ServerConfig`` is composed of one frozen struct per topic and is never changed after start-up;
what is found out later (pages, vocabulary, limits) travels in messages. Flags use SGLang's
names where it has one. ``launch.py`` reads flags and ``--config file.yaml`` into it (a flag beats
the file; an unknown name is an error), writes it to ``config.json`` in the 0700 run directory, and
every process reads it from there.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import ConfigError


def flag(help_text: str, *, ge: float | None = None, gt: float | None = None, le: float | None = None) -> Meta:
    """Attach a flag's help text and its limits to a config field."""
    given = {name: limit for name, limit in (("ge", ge), ("gt", gt), ("le", le)) if limit is not None}
    kwargs: dict[str, Any] = {"description": help_text, **given}
    return Meta(**kwargs)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: frozen, unknown names refused."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """Model"""

    model: Annotated[
        str,
        flag("Hugging Face id, local folder (safetensors) or .gguf file; empty: SmolLM2-135M-Instruct"),
    ] = ""
    tokenizer: Annotated[str, flag("folder with another tokenizer (default: the model's own)")] = ""
    served_model_name: Annotated[list[str], flag("name or names clients may use (default: the model's name)")] = []
    revision: Annotated[str, flag("revision of a Hugging Face id")] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        flag("weights and arithmetic; auto: bfloat16 where the machine has it or cpu-fast runs, else float32"),
    ] = "auto"
    context_length: Annotated[int, flag("most positions of a request; 0: the model's own limit", ge=0)] = 0
    load_format: Annotated[
        Literal["auto", "dummy"],
        flag("dummy: random weights from config.json, for benchmarks"),
    ] = "auto"
    trust_remote_code: Annotated[bool, flag("let transformers run Python code that comes with the model")] = False
    chat_template: Annotated[str, flag("Jinja file or inline template instead of the model's own")] = ""
    tool_call_parser: Annotated[str, flag("syntax of tool calls; auto: found from the chat template")] = "auto"
    reasoning_parser: Annotated[str, flag("syntax of reasoning blocks (deepseek-r1, qwen3); empty: none")] = ""
    sampling_defaults: Annotated[
        Literal["model", "openai"], flag("model: defaults from generation_config.json; openai: the protocol's own")
    ] = "model"
    random_seed: Annotated[int, flag("seed of everything drawn at start-up (dummy weights)", ge=0)] = 0


class HttpConfig(Section, frozen=True, kw_only=True):
    """HTTP"""

    host: Annotated[str, flag("address to listen on")] = "127.0.0.1"
    port: Annotated[int, flag("port to listen on", ge=0, le=65535)] = 30000
    gateways: Annotated[int, flag("gateway processes behind the one port", ge=1, le=64)] = 1
    tokenizers: Annotated[int, flag("tokenizer processes", ge=1, le=64)] = 1
    api_key: Annotated[list[str], flag("keys clients must send one of; none: open")] = []
    admin_api_key: Annotated[list[str], flag("keys for the endpoints that change state; none: as --api-key")] = []
    cors_origin: Annotated[list[str], flag("origins allowed by CORS; none: off")] = []
    max_request_bytes: Annotated[int, flag("largest request body; more is 413", ge=1024, le=128 << 20)] = 16 << 20
    max_connections: Annotated[int, flag("open connections per gateway; more is 503", ge=1)] = 4096
    stream_buffer_bytes: Annotated[int, flag("unsent bytes after which a slow reader is cut off", ge=4096)] = 4 << 20


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Scheduler"""

    schedule_policy: Annotated[Literal["fcfs", "lpm", "priority"], flag("order of the waiting queue")] = "fcfs"
    schedule_conservativeness: Annotated[float, flag("above 1 admits more carefully, below 1 more boldly", gt=0)] = 1.0
    chunked_prefill_size: Annotated[
        int,
        flag("most prefill tokens in a step; 0: chosen from the measured step cost", ge=0),
    ] = 0
    max_running_requests: Annotated[int, flag("most requests running at once", ge=1)] = 256
    max_queued_requests: Annotated[int, flag("most requests waiting; more is 503", ge=1)] = 4096
    queue_timeout_s: Annotated[float, flag("longest wait in the queue; 0: no limit", ge=0)] = 0.0
    priority_preemption_threshold: Annotated[
        int,
        flag("priority difference above which a waiting request preempts", ge=0),
    ] = 10
    disable_overlap_schedule: Annotated[bool, flag("send a step only when the one before has returned")] = False


class CacheConfig(Section, frozen=True, kw_only=True):
    """KV cache"""

    page_size: Annotated[int, flag("tokens per KV page; a power of two", ge=1, le=1024)] = 16
    mem_fraction_static: Annotated[
        float,
        flag(
            "fraction of the memory free at start that the KV pool takes; 0: chosen (0.3 on CPU, 0.85 on GPU)",
            ge=0,
            le=1,
        ),
    ] = 0.0
    max_total_tokens: Annotated[int, flag("tokens the KV pool holds; 0: from --mem-fraction-static", ge=0)] = 0
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3"],
        flag(
            "bytes of keys and values; auto: the model's dtype, fp8_e4m3: half of it, and a CPU takes the generic "
            "path, not its fast one"
        ),
    ] = "auto"
    disable_radix_cache: Annotated[bool, flag("do not keep finished prefixes")] = False


class WorkerConfig(Section, frozen=True, kw_only=True):
    """Worker"""

    device: Annotated[Literal["auto", "cpu", "cuda"], flag("where the model runs")] = "auto"
    tp_size: Annotated[int, flag("tensor-parallel ranks, one worker process each", ge=1)] = 1
    cpu_threads: Annotated[int, flag("threads of a CPU worker; 0: the cores this process may use", ge=0)] = 0
    worker_path: Annotated[
        Literal["auto", "generic", "cpu-fast"], flag("which forward pass; auto: the fastest that covers the model")
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "triton", "varlen"],
        flag("attention of the generic path; auto: torch on CPU, on a GPU the first that can of triton, varlen, torch"),
    ] = "auto"
    cuda_graph_max_bs: Annotated[
        int, flag("most rows of a decode step that is replayed as a CUDA graph; 0: chosen", ge=0, le=1024)
    ] = 0
    disable_cuda_graph: Annotated[bool, flag("launch every kernel of a decode step from Python")] = False
    grammar_backend: Annotated[Literal["llguidance", "none"], flag("constrained decoding")] = "llguidance"
    speculative_algorithm: Annotated[
        Literal["auto", "ngram", "none"],
        flag("drafts of next tokens from a request's own text; auto: ngram where that cannot change a token"),
    ] = "auto"
    speculative_num_draft_tokens: Annotated[int, flag("most drafts of a request in a step", ge=1, le=64)] = 8


class HostsConfig(Section, frozen=True, kw_only=True):
    """Several hosts"""

    engine_listen: Annotated[
        str, flag("tcp://ADDRESS:PORT where gateways on other hosts join (and the ports after it, one per tokenizer)")
    ] = ""
    curve_keys: Annotated[str, flag("folder of keys for --engine-listen, made by --make-curve-keys")] = ""


class RuntimeConfig(Section, frozen=True, kw_only=True):
    """Runtime"""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], flag("log level")] = "info"
    log_format: Annotated[Literal["text", "json"], flag("one JSON object per line, or text")] = "text"
    trace: Annotated[str, flag("folder for traces of every decision; empty: off")] = ""
    trace_mib: Annotated[int, flag("most MiB of trace per process; the oldest goes first", ge=1)] = 256
    drain_seconds: Annotated[float, flag("after SIGTERM: time for what runs to finish", ge=0)] = 30.0
    start_timeout_s: Annotated[float, flag("longest time until every process is ready", gt=0)] = 600.0
    hang_timeout_s: Annotated[
        float,
        flag("a busy process without progress for this long is killed and replaced", gt=0),
    ] = 120.0
    max_restarts: Annotated[int, flag("restarts of one process within a minute before everything stops", ge=0)] = 5


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration. Section docstrings are the group titles of ``--help``."""

    model: ModelConfig = ModelConfig()
    http: HttpConfig = HttpConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    worker: WorkerConfig = WorkerConfig()
    hosts: HostsConfig = HostsConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    model_dir: str = ""
    """Filled in by launch.py: the resolved local folder (config.json, safetensors, tokenizer.json)."""


def check(config: ServerConfig) -> None:
    """What no single field's limits can say; raises ``ConfigError`` with the value and the way out."""
    check_finite(config)
    page_size = config.cache.page_size
    if page_size & (page_size - 1):
        raise ConfigError(f"--page-size {page_size}: must be a power of two (16 and 32 are usual)")
    if config.worker.worker_path == "cpu-fast":
        for name, value in (("attention-backend", config.worker.attention_backend),
                            ("kv-cache-dtype", config.cache.kv_cache_dtype)):  # fmt: skip
            if value != "auto":
                raise ConfigError(f"--{name} {value}: the fast CPU path has its own; leave out --worker-path cpu-fast")
    if any(not key for key in (*config.http.api_key, *config.http.admin_api_key)):
        raise ConfigError("--api-key, --admin-api-key: a key is empty; leave the flag out to serve without keys")
    if bool(config.hosts.engine_listen) != bool(config.hosts.curve_keys):
        raise ConfigError("--engine-listen and --curve-keys go together: nobody joins without keys")


def check_finite(config: msgspec.Struct) -> None:
    """Raise ``ConfigError`` for a number in any section that is infinite or none."""
    for section in msgspec.structs.asdict(config).values():
        if not isinstance(section, Section):
            continue
        for name, value in msgspec.structs.asdict(section).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a finite number")


def save(config: ServerConfig) -> bytes:
    """Serialise for ``config.json``."""
    return msgspec.json.encode(config)


def load(data: bytes) -> ServerConfig:
    """Read what ``save`` wrote; raises ``msgspec.ValidationError`` for anything else."""
    return msgspec.json.decode(data, type=ServerConfig)
