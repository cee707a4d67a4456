"""The items that a stored response answered, page by page, as OpenAI's API tells them."""

from typing import Any, Literal

from msgspec import Struct

from quire.core.errors import ParameterError
from quire.frontend.openai.responses.store import StoredResponse

MAX_PAGE = 100

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ItemPage(Struct, kw_only=True):
    """Answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def item_page(stored: StoredResponse, *, limit: int, after: str | None, newest_first: bool) -> ItemPage:
    """One page of the items, those of earlier responses of the conversation included.

    Args:
        after: id of the item that the page follows.

    Raises:
        ParameterError: a limit that is too small or large, or an unknown id.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise ParameterError(f"limit must be between 1 and {MAX_PAGE}, got {limit}.", param="limit")
    suffix = stored.response.id.removeprefix("resp_")
    items = [_told(item, f"{suffix}_{index}") for index, item in enumerate(stored.items[: stored.num_input_items])]
    if newest_first:
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ParameterError(f"after names {after!r}, which is no item of this response.", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return ItemPage(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=len(items) > limit,
    )


def _told(item: dict[str, Any], suffix: str) -> dict[str, Any]:
    """An item with the fields that a client may leave out."""
    kind = item.get("type", "message")
    told = {"id": f"{_PREFIXES.get(kind, 'item')}_{suffix}", "type": kind, "status": "completed", **item}
    if kind == "message" and isinstance(item.get("content"), str):
        part = {"type": "input_text", "text": item["content"]}
        if item.get("role") == "assistant":
            part = {"type": "output_text", "text": item["content"], "annotations": []}
        told["content"] = [part]
    return told
