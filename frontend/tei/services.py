"""The services behind the routes of Text Embeddings Inference."""

from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.client_headers import ClientHeaders
from quire.frontend.http.json_request import JsonRequest
from quire.frontend.pooling.services import PoolingServices
from quire.frontend.tei.call import Call
from quire.frontend.tei.own_task import OwnTask
from quire.frontend.tei.service import TextEmbeddings
from quire.frontend.tei.tokenizing import Tokenizing


class TeiServices:
    """The services of one server."""

    def __init__(self, engine: AsyncLLM, pooling: PoolingServices) -> None:
        self.engine = engine
        self.pooling = pooling
        self.texts = TextEmbeddings(engine, pooling)
        self.own_task = OwnTask(pooling, self.texts)
        self.tokenizing = Tokenizing(engine, pooling)

    def call(self, request: JsonRequest) -> Call:
        """A call that begins now."""
        return Call(ClientHeaders.read(request.headers), self.engine.config.device)
