"""Every option of the HTTP server, declared once, as in `core/config/`.

The engine never sees these; `frontend/http/server.py` and the handlers read them. Command-line flags derive from the
fields.
"""

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, field

from quire.core import envs
from quire.core.config.observability import ObservabilityConfig
from quire.core.config.types import Positive
from quire.core.errors import ConfigError
from quire.frontend.chat.config import ChatConfig
from quire.frontend.entry_store.store import EntryStore
from quire.frontend.keys.caller import Limits
from quire.frontend.keys.key_ring import KeyRing
from quire.frontend.keys.rate_limits import RateLimits

LEAST_BODY_BUDGET = 256 * 1024**2
"""Bytes of all request bodies together, unless an option says otherwise."""


class ServerConfig(ChatConfig, frozen=True, kw_only=True):
    """The HTTP server: where it listens, whom it lets in, what it answers and what it logs."""

    host: Annotated[str | None, Meta(description="Address to listen on; every interface when unset.")] = None
    port: Annotated[
        int, Meta(ge=0, le=65535, description="TCP port to listen on; 0 lets the system choose a free one.")
    ] = 8000
    uds: Annotated[
        str | None,
        Meta(description="Listen on this Unix socket instead of --host and --port.", extra={"protects": True}),
    ] = None
    api_server_count: Annotated[
        Positive | None,
        Meta(
            description="Processes that serve HTTP on this port; when unset, one for each engine.",
            extra={"aliases": ["-asc"]},
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        Meta(
            description="Keys that clients may present; $QUIRE_API_KEY when unset, open when neither is set. What "
            "monitors read (/health, /ready, /live, /ping, /metrics, /version, /load) and the documentation are open "
            "all the same. The flag may be repeated.",
            extra={"repeatable": True, "protects": True},
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        Meta(
            description="File of API keys in addition to --api-key, each with name, key or hash, and perhaps weight, "
            "requests_per_minute and tokens_per_minute: TOML (.toml), a JSON list, or JSON lines. It is read again "
            "when it changes, and on SIGHUP.",
            extra={"protects": True},
        ),
    ] = None
    admin_api_key: Annotated[
        list[str] | None,
        Meta(
            description="Keys for routes that change how the server runs (profiler, cache, set-up), which then take no "
            "others. A server with other keys answers these routes 403 without one. The flag may be repeated.",
            extra={"repeatable": True, "protects": True},
        ),
    ] = None
    admin_port: Annotated[
        str | None,
        Meta(
            description="PORT or HOST:PORT (127.0.0.1 by default) that alone answers routes that change how a server "
            "runs, without a key unless --admin-api-key is given; the other port answers them 403.",
            extra={"protects": True},
        ),
    ] = None
    ssl_keyfile: Annotated[str | None, Meta(description="TLS private key, PEM.")] = None
    ssl_certfile: Annotated[
        str | None, Meta(description="TLS certificate chain, PEM; turns HTTPS on.", extra={"protects": True})
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        Meta(description="Certificates of authorities that may sign clients'.", extra={"protects": True}),
    ] = None
    ssl_cert_reqs: Annotated[
        Literal[0, 1, 2], Meta(description="Client certificates: 0 not asked for, 1 optional, 2 required.")
    ] = 0
    ssl_ciphers: Annotated[str | None, Meta(description="TLS cipher list in OpenSSL's notation.")] = None
    enable_ssl_refresh: Annotated[
        bool, Meta(description="Load the TLS files again when they change; new connections use them.")
    ] = False
    h11_max_incomplete_event_size: Annotated[
        int,
        Meta(
            ge=1,
            description="Most bytes of a request's line and headers; past it the answer is 431.",
            extra={"parse": "human_int"},
        ),
    ] = 64 * 1024
    h11_max_header_count: Annotated[
        int, Meta(ge=1, description="Most headers of a request; past it the answer is 431.")
    ] = 256
    max_connections: Annotated[
        Positive | None,
        Meta(
            description="Most connections of all API servers together; one more is answered 503 and closed. By each "
            "process's limit on open files when unset."
        ),
    ] = None
    middleware: Annotated[
        list[str],
        Meta(
            description="ASGI middleware around the server's application, by import path: a class, or a coroutine "
            "function (request, call_next) for Starlette. May be given several times; the last is outermost.",
            extra={"repeatable": True},
        ),
    ] = field(default_factory=list)
    root_path: Annotated[str | None, Meta(description="Path prefix under which a proxy serves this server.")] = None
    allow_credentials: Annotated[
        bool, Meta(description="CORS: let browsers send cookies and client certificates along.")
    ] = False
    allowed_origins: Annotated[
        list[str],
        Meta(
            description="CORS: origins whose pages may call the server, as a JSON list such as "
            '["http://localhost:3000"]; ["*"] lets every page, [] none.',
            extra={"parse": "json"},
        ),
    ] = field(default_factory=list)
    allowed_methods: Annotated[
        list[str], Meta(description="CORS: methods that pages may use, as a JSON list.", extra={"parse": "json"})
    ] = field(default_factory=lambda: ["*"])
    allowed_headers: Annotated[
        list[str], Meta(description="CORS: headers that pages may send, as a JSON list.", extra={"parse": "json"})
    ] = field(default_factory=lambda: ["*"])
    enable_request_id_headers: Annotated[
        bool, Meta(description="Answer with X-Request-Id: the client's own, else a fresh one.")
    ] = False
    audit_log_path: Annotated[
        str | None,
        Meta(
            description="File for a JSON line about each HTTP request: time, id, client, key, route, status, seconds, "
            "bytes and tokens, and no prompts; - is the standard output. Lines are appended, by several servers too."
        ),
    ] = None
    max_request_body_bytes: Annotated[
        int,
        Meta(ge=1, description="Largest request body; past it the answer is 413.", extra={"parse": "human_int"}),
    ] = 8 * 1024**2
    max_inflight_body_bytes: Annotated[
        Positive | None,
        Meta(
            description="Most bytes of request bodies that all API servers together have received and not read yet; "
            "past it a body of more than 64 KiB is answered 429. 256 MiB when unset, or room for two of "
            "--max-request-body-bytes.",
            extra={"parse": "human_int"},
        ),
    ] = None
    strict_fields: Annotated[
        bool,
        Meta(
            description="Refuse requests with unknown fields. Otherwise such fields are ignored, logged once by name "
            "and listed in the answer's X-Quire-Ignored-Fields."
        ),
    ] = False
    shutdown_timeout: Annotated[
        int,
        Meta(ge=0, description="Seconds that running requests get to finish at shutdown; 0 ends them at once."),
    ] = 0

    response_role: Annotated[str, Meta(description="Role of the answers of /v1/chat/completions.")] = "assistant"
    max_stored_responses: Annotated[
        int,
        Meta(
            ge=0,
            description=(
                "Responses and conversations that /v1/responses and /v1/conversations keep for later requests, at the "
                "longest until the server is restarted; 0 keeps none."
            ),
        ),
    ] = 1000
    max_stored_response_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of all responses and conversations kept; the oldest go first.",
            extra={"parse": "human_int"},
        ),
    ] = 256 * 1024**2
    max_stored_response_seconds: Annotated[
        int, Meta(ge=1, description="Seconds that a response or conversation is kept.")
    ] = 24 * 3600
    enable_force_include_usage: Annotated[
        bool,
        Meta(description="Report token usage in every event of every stream and at its end, asked for or not."),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(
            description="Spell tokens in logprobs as token_id:123, because several tokens may have equal text; a "
            "request's own return_tokens_as_token_ids goes first."
        ),
    ] = False
    fingerprint_mode: Annotated[
        Literal["full", "hash", "custom", "none"],
        Meta(
            description="system_fingerprint of answers: version, parallelism and a hash of the model and its options "
            "(full), the same without parallelism (hash), the text of --fingerprint-value (custom), or null (none)."
        ),
    ] = "full"
    fingerprint_value: Annotated[
        str | None, Meta(description="system_fingerprint of answers with --fingerprint-mode custom.")
    ] = None
    enable_prompt_tokens_details: Annotated[
        bool,
        Meta(
            description="Report in usage of text completions how many prompt tokens came from the prefix cache, as "
            "that of conversations always does."
        ),
    ] = False
    sse_keep_alive_interval: Annotated[
        int, Meta(ge=0, description="Seconds of silence after which a stream sends a comment line; 0 sends none.")
    ] = 15
    enable_server_load_tracking: Annotated[
        bool, Meta(description="Count requests in flight and report them at /load.")
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, Meta(description="Answer GET /tokenizer_info with the tokenizer's configuration and chat template.")
    ] = False
    disable_fastapi_docs: Annotated[bool, Meta(description="Turn off the OpenAPI schema and its pages.")] = False

    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"],
        Meta(description="What the HTTP server logs; info, debug and trace include one line for each HTTP request."),
    ] = "info"
    disable_uvicorn_access_log: Annotated[
        bool, Meta(description="No line for each HTTP request, whatever --uvicorn-log-level says.")
    ] = False
    disable_access_log_for_endpoints: Annotated[
        str | None, Meta(description="Paths, separated by commas, whose HTTP requests are never logged.")
    ] = None
    max_log_len: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Characters of a text, or token ids, that a log line shows at most; no limit when unset."),
    ] = None
    enable_log_outputs: Annotated[
        bool,
        Meta(description="Log what the model writes; needs --enable-log-requests. Token ids show at log level DEBUG."),
    ] = False
    enable_log_deltas: Annotated[
        bool, Meta(description="With --enable-log-outputs, log each part of a stream too, not only its whole text.")
    ] = True
    log_error_stack: Annotated[bool, Meta(description="Log the stack trace of every error answer.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_tls()
        if self.api_key is not None and (not self.api_key or not all(key.strip() for key in self.api_key)):
            raise ConfigError("--api-key: an empty key would let anyone in; give a key, or leave the option out.")
        if self.admin_api_key is not None and not (self.admin_api_key and all(map(str.strip, self.admin_api_key))):
            raise ConfigError("--admin-api-key: an empty key would let anyone in; give a key, or leave it out.")
        if self.admin_port is not None and not 0 < self.admin_address[1] < 2**16:
            raise ConfigError(f"--admin-port must be PORT or HOST:PORT, ports up to 65535, got {self.admin_port!r}.")
        if self.max_inflight_body_bytes is not None and self.max_inflight_body_bytes < self.max_request_body_bytes:
            raise ConfigError(
                f"--max-inflight-body-bytes {self.max_inflight_body_bytes} has no room for one body of "
                f"--max-request-body-bytes {self.max_request_body_bytes}; raise it, or lower the other."
            )
        if (self.fingerprint_mode == "custom") != (self.fingerprint_value is not None):
            raise ConfigError("--fingerprint-mode custom and --fingerprint-value need each other.")

    @property
    def body_budget_bytes(self) -> int:
        """What all bodies may take together until they are read."""
        return self.max_inflight_body_bytes or max(LEAST_BODY_BUDGET, 2 * self.max_request_body_bytes)

    @property
    def admin_address(self) -> tuple[str, int]:
        """The host and port of `--admin-port`; port 0: it is none."""
        host, _, port = (self.admin_port or "").rpartition(":")
        return host.strip("[]") or "127.0.0.1", int(port) if port.isascii() and port.isdigit() else 0

    def check_keys(self) -> None:
        """Raises ConfigError if the environment's key is empty, or the key file wrong."""
        self.key_ring(RateLimits())

    def check_logs(self, engine: ObservabilityConfig) -> None:
        """Raises ConfigError if outputs shall be logged but requests are not."""
        if self.enable_log_outputs and not engine.enable_log_requests:
            raise ConfigError("--enable-log-outputs needs --enable-log-requests as well.")

    def _check_tls(self) -> None:
        for flag, is_given in (
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
            ("--ssl-cert-reqs", self.ssl_cert_reqs),
            ("--ssl-ciphers", self.ssl_ciphers),
            ("--enable-ssl-refresh", self.enable_ssl_refresh),
        ):
            if is_given and not self.ssl_certfile:
                raise ConfigError(f"{flag} needs --ssl-certfile as well: without a certificate, connections are HTTP.")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} checks clients' certificates, and needs the authorities that "
                "may sign them: --ssl-ca-certs FILE."
            )
        if self.ssl_ca_certs and not self.ssl_cert_reqs:
            raise ConfigError("--ssl-ca-certs checks nothing without --ssl-cert-reqs 1 (optional) or 2 (required).")
        for flag, path in (
            ("--ssl-keyfile", self.ssl_keyfile),
            ("--ssl-certfile", self.ssl_certfile),
            ("--ssl-ca-certs", self.ssl_ca_certs),
        ):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag}: there is no file {path!r}.")

    def entry_store(self) -> EntryStore:
        """An empty store of responses and conversations, with these bounds."""
        return EntryStore(self.max_stored_responses, self.max_stored_response_bytes, self.max_stored_response_seconds)

    def key_ring(self, limits: Limits) -> KeyRing | None:
        """The keys that clients may present; None: anyone may call. Raises ConfigError.

        Args:
            limits: counts what each key uses.
        """
        keys = self.accepted_api_keys
        return KeyRing(keys, self.api_key_file, limits) if keys or self.api_key_file is not None else None

    @property
    def needs_key(self) -> bool:
        """True if clients need a key."""
        return bool(self.accepted_api_keys) or self.api_key_file is not None

    @property
    def path_prefix(self) -> str:
        """`root_path` with a slash before it and none behind; empty without one."""
        path = (self.root_path or "").strip("/")
        return f"/{path}" if path else ""

    @property
    def accepted_api_keys(self) -> list[str]:
        """Keys that clients may present: `--api-key`, else the environment's; empty means that anyone may call.

        Raises:
            ConfigError: the environment's key is empty.
        """
        if self.api_key is not None:
            return self.api_key
        from_environment = envs.read("API_KEY")
        if from_environment is None:
            return []
        if not from_environment.strip():
            raise ConfigError("QUIRE_API_KEY or VLLM_API_KEY is empty, which lets anyone in; set a key, or unset it.")
        return [from_environment]
