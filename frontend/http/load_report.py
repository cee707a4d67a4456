"""The engines' load in the headers of an answer: ORCA load reports, which load balancers read.

Format: https://github.com/cncf/xds/blob/main/xds/data/orca/v3/orca_load_report.proto, as text or JSON.
"""

import json

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.http.json_request import JsonRequest

_ASKED_FORMAT = "endpoint-load-metrics-format"
_REPORT = "endpoint-load-metrics"


class LoadReport:
    """Reports the load of all engines to clients that send the header `endpoint-load-metrics-format`."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._metrics = engine.metrics

    def headers(self, request: JsonRequest) -> dict[str, str]:
        """The report in the format that `request` asks for; none for an unknown format, or with --disable-log-stats."""
        asked = request.headers.get(_ASKED_FORMAT, "").lower()
        if not asked or self._metrics is None:
            return {}
        waiting, usage = self._metrics.num_waiting, self._metrics.kv_cache_usage
        named = {"num_requests_waiting": float(waiting), "kv_cache_usage_perc": float(usage)}
        match asked:
            case "text":
                return {_REPORT: "TEXT " + ", ".join(f"named_metrics.{name}={each}" for name, each in named.items())}
            case "json":
                return {_REPORT: "JSON " + json.dumps({"named_metrics": named})}
        return {}
