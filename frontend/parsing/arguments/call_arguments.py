"""Reads a call's arguments that the model writes as JSON."""

from collections.abc import Callable

from quire.frontend.parsing.arguments.checked_object import CheckedObject
from quire.frontend.parsing.arguments.typed_values import ValueSchema
from quire.frontend.parsing.event_log import EventLog
from quire.frontend.parsing.json_text import read_value
from quire.frontend.parsing.literals import Notation, read_literal
from quire.frontend.parsing.reader import Malformed, Markers, Reader, Steps

_NO_MARKERS = Markers(())


def checked_arguments(log: EventLog, start: Callable[[], None]) -> CheckedObject:
    """Takes the arguments of a call, and logs them as JSON. `start` begins the call before the first is logged."""

    def write(text: str) -> None:
        if not log.in_call:
            start()
        log.arguments(text)

    return CheckedObject(write)


def read_arguments(reader: Reader, log: EventLog, start: Callable[[], None], end: Markers = _NO_MARKERS) -> Steps[bool]:
    """Passes on the object that comes next as a call's arguments.

    Args:
        start: begins the call.

    Returns:
        True if the object is complete; False if the text, or a marker of `end` (which is read), ended it.

    Raises:
        Malformed: no argument is JSON, so there is no call.
    """
    arguments = checked_arguments(log, start)
    complete = yield from read_value(reader, arguments.push, end, arguments.close)
    if complete:
        arguments.close()
    if not log.in_call:
        if complete or arguments.is_broken or not reader.is_interrupted:
            raise Malformed
        start()
    return complete


def read_literal_arguments(
    reader: Reader, log: EventLog, start: Callable[[], None], notation: Notation, schema: ValueSchema
) -> Steps[None]:
    """As `read_arguments`, for arguments in another notation, whose values get the types of `schema`."""
    arguments = checked_arguments(log, start)
    try:
        yield from read_literal(reader, arguments.push, notation, schema)
    except Malformed:
        if not reader.is_at_end:
            arguments.close()
        elif reader.is_interrupted and not log.in_call:
            start()
        raise
    arguments.close()
