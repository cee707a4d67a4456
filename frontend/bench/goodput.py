"""Goodput: completed requests per second that met every service level objective (`--goodput ttft:200 tpot:50`)."""

from quire.core.errors import ConfigError
from quire.frontend.bench.figures import RequestTiming

OBJECTIVES = ("ttft", "tpot", "e2el")


def parse_objectives(pairs: list[str]) -> dict[str, float]:
    """Parses pairs `NAME:MILLISECONDS` into seconds by name.

    Raises:
        ConfigError: a name is unknown, or has no time after it.
    """
    objectives = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in OBJECTIVES:
            raise ConfigError(f"--goodput: unknown {name!r}; choose from {', '.join(OBJECTIVES)}.")
        try:
            milliseconds = float(text)
        except ValueError:
            raise ConfigError(f"--goodput takes NAME:MILLISECONDS, such as ttft:200; got {pair!r}.") from None
        if not milliseconds >= 0:
            raise ConfigError(f"--goodput: {pair!r} is below zero.")
        objectives[name] = milliseconds / 1000
    return objectives


def request_goodput(timings: list[RequestTiming], objectives: dict[str, float], duration: float) -> float:
    """Requests per second that met all `objectives` (seconds)."""
    return sum(_met(timing, objectives) for timing in timings) / duration


def _met(timing: RequestTiming, objectives: dict[str, float]) -> bool:
    if timing.error:
        return False
    # An output of one token has no time per output token, so it cannot miss that objective.
    seconds = {
        "ttft": timing.ttft,
        "tpot": timing.tpot if timing.output_tokens > 1 else 0.0,
        "e2el": timing.latency,
    }
    return all(seconds[name] <= limit for name, limit in objectives.items())
