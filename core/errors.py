"""Quire's one exception tree. The HTTP layer maps it to status codes in a single place.

QuireError
├── ConfigError            a flag, keyword or file is wrong; the process cannot start
│   └── ModelLoadError     the checkpoint cannot be read, or does not fit in memory
│       └── NoMemoryError  the model does not fit in the memory that is free now
├── RequestError           this request cannot be served as asked; nothing else is disturbed
│   ├── ParameterError     a field is out of range, contradictory or unsupported (400)
│   ├── NotFoundError      an unknown model or resource (404)
│   └── OverloadedError    the waiting queue is full (429)
├── DeadlineError          the time that the caller gave the request is over (504)
├── TokenizerError         the checkpoint's own tokenizer failed on a text (500)
├── UnavailableError       loading, stopping, or too busy a host: another attempt may succeed (503)
└── EngineError            the engine failed while it held the request (500)
    ├── WorkerCallError    a worker could not do what it was called for, and goes on (500)
    └── EngineDeadError    the engine is gone and will not come back (503)
        ├── PeerLostError  it could not go on without another engine or worker
        ├── HostLostError  one of its hosts is gone; the next engine waits for the host
        └── EngineKilledError  somebody outside has ended or stopped one of its processes
"""


class QuireError(Exception):
    """Root of every error that Quire raises on purpose. The message says what was asked and what to change."""


class ConfigError(QuireError):
    """A flag, keyword argument, environment variable or configuration file is wrong."""


class ModelLoadError(ConfigError):
    """The checkpoint is missing, corrupt, of an unknown architecture, or does not fit in memory."""


class NoMemoryError(ModelLoadError):
    """The model does not fit in the memory that is free now. Another start may find more."""


class RequestError(QuireError):
    """The request cannot be served as asked."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ParameterError(RequestError, ValueError):
    """A request field is out of range, contradictory or unsupported; `param` names the field."""


class NotFoundError(RequestError):
    """The request names a model or a resource that does not exist here."""


class OverloadedError(RequestError):
    """The waiting queue is full; try again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class BodyTooLargeError(RequestError):
    """The request's body is larger than the server ever takes."""


class DeadlineError(QuireError):
    """The request was not finished in the time that its caller gave it."""


class TokenizerError(QuireError):
    """The tokenizer that a checkpoint or the Transformers library brings as code failed on a text."""


class UnavailableError(QuireError):
    """Nothing is wrong with the request, but it cannot be served now; try again after `retry_after_seconds`."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineError(QuireError):
    """The engine failed while it held the request."""


class WorkerCallError(EngineError):
    """A worker could not do what it was called for. It goes on."""


class EngineDeadError(EngineError):
    """The engine process is gone and could not be restarted."""


class PeerLostError(EngineDeadError):
    """The engine could not go on, because a worker or another engine that it works with has ended."""


class HostLostError(EngineDeadError):
    """A host with workers of the engine, or with the engine itself, is gone. The next engine waits for the host."""


class EngineKilledError(EngineDeadError):
    """Somebody outside has ended or stopped a process of the engine, and no request is to blame."""
