"""Items of stored responses and conversations as clients read them, page by page."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import ParameterError

MAX_PAGE = 100

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "compaction": "cmp",
}


class ItemPage(Struct, kw_only=True):
    """Some items of a list."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def item_page(
    items: Sequence[dict[str, Any]], *, limit: int = MAX_PAGE, after: str | None = None, newest_first: bool = False
) -> ItemPage:
    """One page of the items.

    Args:
        items: have ids; the oldest is first.
        after: id of the item that the page follows.

    Raises:
        ParameterError: a limit that is too small or large, or an unknown id.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise ParameterError(f"limit must be between 1 and {MAX_PAGE}, got {limit}.", param="limit")
    listed = list(reversed(items)) if newest_first else list(items)
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise ParameterError(f"after names {after!r}, which is no item of this list.", param="after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[:limit]
    return page_of(page, has_more=len(listed) > limit)


def page_of(page: list[dict[str, Any]], *, has_more: bool = False) -> ItemPage:
    """A page of these items, which have ids."""
    return ItemPage(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=has_more,
    )


def complete_item(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    """Adds the fields that a client may leave out. A missing id becomes one that ends in `suffix`."""
    kind = item.get("type", "message")
    complete = {"id": _id(kind, suffix), "type": kind, "status": "completed", **item}
    if kind == "message" and isinstance(item.get("content"), str):
        part = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": item["content"], "annotations": []}
        complete["content"] = [part]
    return complete


def with_unique_ids(items: Iterable[dict[str, Any]], taken: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Items with all fields, as by `complete_item`, and unique ids.

    Args:
        taken: ids of other items.
    """
    ids, complete = set(taken), []
    for item in items:
        each = complete_item(item, uuid.uuid4().hex)
        if not isinstance(each["id"], str) or each["id"] in ids:
            each["id"] = _id(each["type"], uuid.uuid4().hex)
        ids.add(each["id"])
        complete.append(each)
    return complete


def _id(kind: Any, suffix: str) -> str:
    return f"{_PREFIXES.get(kind, 'item')}_{suffix}"
