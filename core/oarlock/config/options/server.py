"""Option table: HTTP server, limits of requests, logs.

Owns: these rows.
Reads: `config.option`.
Never: holds logic beyond a value's mapping.
"""

from __future__ import annotations

from functools import partial

from oarlock.config.option import Option

_http = partial(Option, group="HTTP server", offline=False)
_where = partial(_http, blank_is_unset=False)  # an empty variable must not open to all what was meant for few
_limit = partial(Option, group="Limits of one request", offline=False, low=1)
_log = partial(Option, group="Logs and statistics")

OPTIONS: tuple[Option, ...] = (
    _where("host", "str", None, "Address to listen on. Unset: all.", "server.host"),
    _http("port", "int", 8000, "Port to listen on; 0: any free one.", "server.port", low=0, high=65535),
    _where("uds", "str", None, "Unix socket to listen on instead of host and port.", "server.uds"),
    _where(
        "api-key", "repeat", (), "Key that requests must send as a bearer token; repeatable. Unset: OARLOCK_API_KEY or VLLM_API_KEY of the "
        "environment, else none is asked for. Guards every route but /health, /ping and /version.", "server.api_keys",
    ),
    _http("allow-credentials", "bool", False, "CORS: allow credentials.", "server.allow_credentials"),
    _http("allowed-origins", "strings", (), 'CORS: JSON list of origins; ["*"]: all. Unset: none.', "server.allowed_origins"),
    _http("allowed-methods", "strings", ("*",), "CORS: JSON list of methods.", "server.allowed_methods"),
    _http("allowed-headers", "strings", ("*",), "CORS: JSON list of headers.", "server.allowed_headers"),
    _where("ssl-keyfile", "str", None, "Private key file for HTTPS.", "server.ssl_keyfile"),
    _where("ssl-certfile", "str", None, "Certificate file for HTTPS.", "server.ssl_certfile"),
    _where("ssl-ca-certs", "str", None, "Certificates of authorities that client certificates are checked against.", "server.ssl_ca_certs"),
    _http("ssl-cert-reqs", "int", 0, "Client certificates: 0 none, 1 optional, 2 required.", "server.ssl_cert_reqs", choices=(0, 1, 2)),
    _http("root-path", "str", None, "Path prefix under which a proxy serves this server.", "server.root_path"),
    _http("middleware", "repeat", (), "ASGI middleware by import path, a function or a class; repeatable.", "server.middleware"),
    _http("chat-template", "str", None, "Chat template: a file, the template itself, or the name of one of the checkpoint's (tool_use). Unset: the checkpoint's.", "server.chat_template"),
    _http("response-role", "str", "assistant", "Role in chat answers.", "server.response_role"),
    _http(
        "enable-auto-tool-choice", "bool", False, "Let the model decide whether it calls one of a request's tools (tool_choice auto). Needs "
        "--tool-call-parser.", "server.enable_auto_tool_choice",
    ),
    _http(
        "tool-call-parser", "str", None, "What reads tool calls out of the model's text: a name from a plugin, such as hermes (Qwen), llama3_json, "
        "pythonic, mistral, deepseek_v3, openai (gpt-oss) or json of plugins/tool_parsers.", "server.tool_call_parser",
    ),
    _http(
        "exclude-tools-when-tool-choice-none", "bool", False, "With tool_choice none, leave the tools out of the prompt.", "server.exclude_tools_when_none",
    ),
    _http(
        "reasoning-parser", "str", None, "What tells a model's reasoning from its answer: a name from a plugin, such as deepseek_r1, qwen3, mistral or "
        "openai_gptoss of plugins/tool_parsers.", "server.reasoning_parser",
    ),
    _http(
        "allow-unknown-fields", "bool", False, "Accept unknown request fields and name them in a response header, instead of a 400.",
        "server.allow_unknown_fields",
    ),
    _http(
        "allow-request-chat-template", "bool", False, "Let requests bring their own chat template: only for clients that you trust, as a "
        "template can use up the memory.", "server.allow_request_chat_template",
    ),
    _http("drain-grace", "float", 30.0, "Seconds that running requests get after SIGTERM.", "server.drain_grace_s", low=0),
    _http(
        "stall-time", "float", 120.0, "Seconds without a word from the engine, while requests are open, after which /health is 503. "
        "Longer than the longest step.", "server.stall_s", low=1,
    ),
    _http(
        "uvicorn-log-level", "str", "info", "Log level of the HTTP library.", "server.uvicorn_log_level",
        choices=("debug", "info", "warning", "error", "critical", "trace"),
    ),
    _limit("max-body-bytes", "bytes", 32 << 20, "Largest request body.", "server.max_body_bytes"),
    _limit("max-n", "int", 128, "Largest n and best_of, up to 128.", "server.max_n", high=128),
    _limit("max-stop-strings", "int", 16, "Most stop strings.", "server.max_stop_strings"),
    _limit("max-stop-len", "int", 1024, "Longest stop string, in characters.", "server.max_stop_len"),
    _limit("max-tools", "int", 128, "Most tools in one request.", "server.max_tools"),
    _limit("max-tool-bytes", "bytes", 256 << 10, "Most bytes of all tools of a request, as JSON.", "server.max_tool_bytes"),
    _limit("max-prompts", "int", 1024, "Most prompts in one request.", "server.max_prompts"),
    _limit("max-logit-bias", "int", 1024, "Most entries of logit_bias.", "server.max_logit_bias"),
    _limit("max-bad-words", "int", 256, "Most bad_words.", "server.max_bad_words"),
    _limit("max-stop-token-ids", "int", 1024, "Most stop_token_ids.", "server.max_stop_token_ids"),
    _limit("max-messages", "int", 16384, "Most messages of one conversation, up to 16384.", "server.max_messages", high=16384),
    _limit(
        "max-text-chars", "int", 1 << 20, "Longest text that need not fit the context: of /tokenize, and with truncate_prompt_tokens. 32 characters for each token "
        "of the context are taken all the same.", "server.max_text_chars",
    ),
    _limit("max-grammar-chars", "int", 1 << 17, "Longest schema, pattern, grammar or list of choices, up to 131072.", "server.max_grammar_chars", high=1 << 17),
    _log("log-level", "str", "info", "Least level that is logged.", "observability.log_level", choices=("debug", "info", "warning", "error")),
    _log("log-json", "bool", False, "Log one JSON object a line.", "observability.log_json"),
    _log(
        "disable-log-stats", "bool", False, "Log no statistics; /metrics stays. LLM(...) logs none by default.", "observability.log_stats",
        store=lambda value: not value,
    ),
    _log("enable-log-requests", "bool", False, "Log each request's parameters and prompt.", "observability.log_requests", offline=False),
    _log(
        "disable-log-requests", "bool", False, "Log no requests.", "observability.log_requests",
        fate="obsolete", instead="requests are not logged unless --enable-log-requests is given", store=lambda value: not value,
        offline=False,
    ),
    _log("max-log-len", "int", None, "Longest part of a prompt in the log, in characters. Unset: all of it.", "observability.max_log_len", low=0, offline=False),
    _log(
        "otlp-traces-endpoint", "str", None, "OpenTelemetry collector that gets a span for each request (http://localhost:4318/v1/traces). Needs plugins/otel.",
        "observability.otlp_traces_endpoint", offline=False, blank_is_unset=False,
    ),
)  # fmt: skip
