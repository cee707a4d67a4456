"""The routes of conversations that the server keeps."""

from typing import Annotated, Any, Literal

from litestar import delete, get, post
from litestar.params import Parameter
from litestar.types import ASGIApp

from quire.frontend.http.answers import HttpAnswers, documented, json_answer
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.openai.responses.answers import Conversation, DeletedConversation
from quire.frontend.openai.responses.bodies import ConversationRequest, ConversationUpdate, ItemsRequest
from quire.frontend.openai.responses.conversations import KeptConversations
from quire.frontend.openai.responses.item_page import ItemPage

Limit = Annotated[int, Parameter(description="Most items of the page.")]
Order = Annotated[Literal["asc", "desc"], Parameter(description="Oldest or newest first.")]
After = Annotated[str | None, Parameter(description="Id of the item that the page follows.")]

_ONE = "/conversations/{conversation_id:str}"


def conversation_routes(kept: KeptConversations, answers: HttpAnswers) -> list[Any]:
    """Handlers below /v1."""

    @post("/conversations", status_code=200, responses=documented(Conversation), summary="Converse")
    async def create_conversation(request: JsonRequest, data: ConversationRequest) -> ASGIApp:
        """Starts a conversation that the server keeps, within its bounds and until it is restarted."""
        answers.check_ready()
        return json_answer(await kept.create(data))

    @get(_ONE, responses=documented(Conversation), summary="Conversation")
    async def retrieve_conversation(conversation_id: str) -> ASGIApp:
        """A conversation without its items."""
        answers.check_ready()
        return json_answer(await kept.retrieve(conversation_id))

    @post(_ONE, status_code=200, responses=documented(Conversation), summary="Change")
    async def update_conversation(request: JsonRequest, conversation_id: str, data: ConversationUpdate) -> ASGIApp:
        """Replaces a conversation's metadata."""
        answers.check_ready()
        return json_answer(await kept.update(conversation_id, data))

    @delete(_ONE, status_code=200, responses=documented(DeletedConversation), summary="Forget")
    async def delete_conversation(conversation_id: str) -> ASGIApp:
        """Forgets a conversation."""
        answers.check_ready()
        return json_answer(await kept.delete(conversation_id))

    return [
        create_conversation,
        retrieve_conversation,
        update_conversation,
        delete_conversation,
        *_item_routes(kept, answers),
    ]


def _item_routes(kept: KeptConversations, answers: HttpAnswers) -> list[Any]:
    @post(_ONE + "/items", status_code=200, responses=documented(ItemPage), summary="Add items")
    async def create_items(request: JsonRequest, conversation_id: str, data: ItemsRequest) -> ASGIApp:
        """Adds items at the end of a conversation."""
        answers.check_ready()
        return json_answer(await kept.add(conversation_id, data))

    @get(_ONE + "/items", responses=documented(ItemPage), summary="Items")
    async def list_items(
        conversation_id: str, limit: Limit = 20, order: Order = "desc", after: After = None
    ) -> ASGIApp:
        """A conversation's items, each complete. `include` has no effect."""
        answers.check_ready()
        return json_answer(await kept.items(conversation_id, limit=limit, after=after, newest_first=order == "desc"))

    @get(_ONE + "/items/{item_id:str}", responses=documented(dict[str, Any]), summary="Item")
    async def retrieve_item(conversation_id: str, item_id: str) -> ASGIApp:
        """One item of a conversation."""
        answers.check_ready()
        return json_answer(await kept.item(conversation_id, item_id))

    @delete(_ONE + "/items/{item_id:str}", status_code=200, responses=documented(Conversation), summary="Remove")
    async def delete_item(conversation_id: str, item_id: str) -> ASGIApp:
        """Removes one item from a conversation."""
        answers.check_ready()
        return json_answer(await kept.delete_item(conversation_id, item_id))

    return [create_items, list_items, retrieve_item, delete_item]
