"""Arguments of vLLM's methods that Quire refuses, each with its reason."""

from typing import Any

from quire.core.errors import ParameterError

_REASONS = {
    "trace_headers": "Quire sends no traces.",
    "session_id": "there is one engine, so requests of a session need not meet again.",
    "kv_hints": "Quire's KV cache takes no hints.",
    "reasoning_ended": "the end of the prompt tells the parser of reasoning_parser whether reasoning goes on.",
    "reasoning_parser_kwargs": "the parser of reasoning_parser takes none, and reads the end of the prompt.",
    "stat_loggers": "Quire logs its statistics itself; get_metrics returns them.",
    "profile_prefix": "the name of a timeline's file is the time at which it was written.",
    "delay_iterations": "a timeline begins at once.",
    "max_iterations": "a timeline ends with stop_profile.",
}


def refuse(**given: Any) -> None:
    """Raises ParameterError, which names the argument, unless every one of these asks for nothing."""
    for name, value in given.items():
        if value not in (None, False, {}, [], ()):
            raise ParameterError(f"{name} is not supported: {_REASONS[name]} Leave it out.", param=name)
