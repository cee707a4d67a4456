"""Puts items into prompts: expands their placeholders, and finds the tokens that a tower's rows replace."""

from collections.abc import Callable, Collection, Mapping, Sequence

from quire.core.errors import ParameterError
from quire.core.wire.media import MediaItem, Modality, Run
from quire.frontend.media.messages import Additions
from quire.frontend.media.reader import ReadItem


def expand(text: str, items: Sequence[ReadItem], placeholders: Mapping[Modality, str], param: str) -> str:
    """Replaces the placeholders of items, one after another.

    Args:
        param: the client's name of the text.

    Raises:
        ParameterError: there are more or fewer placeholders than items.
    """
    for modality in dict.fromkeys(item.modality for item in items):
        own, mark = [item for item in items if item.modality == modality], placeholders[modality]
        parts = text.split(mark)
        if len(parts) - 1 != len(own):
            raise ParameterError(
                f"The prompt has {len(parts) - 1} times the placeholder {mark!r}, and there are {len(own)} items of "
                f"type {modality}; each stands for one.",
                param=param,
            )
        text = parts[0] + "".join(item.text + after for item, after in zip(own, parts[1:], strict=True))
    return text


def with_additions(text: str, placeholder: str, additions: Additions) -> str:
    """The text of a prompt with items before it is expanded, with what the model's processor writes into it."""
    before, mark, after = text.rpartition(placeholder)
    return before + mark + additions.after_last + after + additions.at_end


def with_added_ids(
    token_ids: Sequence[int], encode: Callable[[str], list[int]], placeholder: str, additions: Additions
) -> list[int]:
    """The same for a prompt of token ids; `encode` adds no special tokens of its own."""
    mark, ids = encode(placeholder), list(token_ids)
    starts = range(len(ids) - len(mark), -1, -1)
    end = next((start + len(mark) for start in starts if ids[start : start + len(mark)] == mark), 0)
    return [*ids[:end], *encode(additions.after_last), *ids[end:], *encode(additions.at_end)]


def place(
    token_ids: Sequence[int], items: Sequence[ReadItem], marks: Mapping[Modality, Collection[int]], param: str
) -> list[MediaItem]:
    """Finds the tokens of each item in an expanded prompt.

    Args:
        marks: the tokens that stand for rows, by modality.

    Raises:
        ParameterError: the prompt has such tokens that no item put there.
    """
    placed: list[tuple[int, MediaItem]] = []
    for modality in dict.fromkeys(item.modality for item in items):
        positions = [index for index, token_id in enumerate(token_ids) if token_id in marks[modality]]
        own = [item for item in items if item.modality == modality]
        num_rows = sum(item.num_rows for item in own)
        if len(positions) != num_rows:
            raise ParameterError(
                f"The prompt has {len(positions)} tokens that stand for parts of items of type {modality}, and its "
                f"items have {num_rows}; leave their placeholders out of texts.",
                param=param,
            )
        first = 0
        for item in own:
            runs = _runs(positions[first : first + item.num_rows])
            first += item.num_rows
            placed.append((runs[0][0], MediaItem(item.modality, item.digest, runs, item.facts, item.arrays)))
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]


def _runs(positions: Sequence[int]) -> list[Run]:
    runs: list[Run] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return runs


def expand_ids(
    token_ids: Sequence[int], items: Sequence[ReadItem], encode: Callable[[str], list[int]],
    placeholders: Mapping[Modality, str], param: str,
) -> list[int]:  # fmt: skip
    """Replaces the placeholders of items in a prompt of token ids, one after another.

    Args:
        encode: makes token ids of a text, without special tokens of its own.

    Raises:
        ParameterError: there are more or fewer placeholders than items.
    """
    marks = {tuple(encode(placeholders[modality])): modality for modality in {item.modality for item in items}}
    waiting = {modality: [item for item in items if item.modality == modality] for modality in marks.values()}
    found: list[int] = []
    index = 0
    while index < len(token_ids):
        mark = next((mark for mark in marks if tuple(token_ids[index : index + len(mark)]) == mark), None)
        if mark is None:
            found.append(token_ids[index])
            index += 1
            continue
        if not waiting[marks[mark]]:
            raise ParameterError(f"The prompt has more placeholders than items of type {marks[mark]}.", param=param)
        found += encode(waiting[marks[mark]].pop(0).text)
        index += len(mark)
    for modality, rest in waiting.items():
        if rest:
            raise ParameterError(f"The prompt has fewer placeholders than items of type {modality}.", param=param)
    return found
