"""Timelines contain the spans between start and stop, in Chrome's format."""

import json
from pathlib import Path
from typing import Any

from quire.core.trace import NO_SPANS, SpanList, Timeline


def complete_events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans by track."""
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {track: [] for track in tracks.values()}
    for event in events:
        if event["ph"] == "X":
            found[tracks[event["tid"]]].append(event)
    return found


def test_recordings_hold_their_own_spans_only(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "new" / "folder")
    with timeline.span("before"):
        timeline.add([("early", 0.0, 1.0)])
    timeline.start()
    with timeline.span("plan"):
        timeline.add([("step", 1.0, 1.5)])
    first = complete_events(timeline.stop())
    assert [event["name"] for event in first["engine"]] == ["plan"]
    assert [(event["name"], event["ts"], event["dur"]) for event in first["worker 0"]] == [("step", 1e6, 0.5e6)]
    timeline.start()
    second = complete_events(timeline.stop())
    assert second == {"engine": [], "worker 0": []}
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 2


def test_spans_are_taken_once() -> None:
    spans = SpanList()
    with spans.span("outer"), spans.span("inner"):
        pass
    (inner, outer) = spans.drain()
    assert (inner[0], outer[0]) == ("inner", "outer")
    assert outer[1] <= inner[1] <= inner[2] <= outer[2]
    assert spans.drain() == []


def test_nothing_is_recorded_where_nothing_is_wanted() -> None:
    with NO_SPANS.span("a"), NO_SPANS.span("a"):
        pass
    assert NO_SPANS.drain() == []
