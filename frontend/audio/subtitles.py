"""Segments as subtitles: SubRip (.srt) and WebVTT (.vtt)."""

from collections.abc import Sequence

from quire.frontend.audio.answers import Segment


def srt(segments: Sequence[Segment]) -> str:
    """Numbered cues, with a comma before milliseconds."""
    cues = (
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )
    return "".join(cues)


def vtt(segments: Sequence[Segment]) -> str:
    """A head, and cues with a point before milliseconds."""
    cues = (f"{_time(each.start, '.')} --> {_time(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    """The text in one line, without an arrow, which would be read as times."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"
