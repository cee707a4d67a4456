"""The services of all routes for vectors, labels and scores, and the parts that they share."""

from quire.core.logging import get_logger
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat.config import ChatConfig
from quire.frontend.chat.conversation import Conversations
from quire.frontend.io_processors.plugin import Plugin
from quire.frontend.pooling.classification import Classifications
from quire.frontend.pooling.embeddings import Embeddings
from quire.frontend.pooling.encoding import Encoding
from quire.frontend.pooling.inputs import Inputs
from quire.frontend.pooling.pairs import PairScoring
from quire.frontend.pooling.pooled import PooledOutputs
from quire.frontend.pooling.scoring import Scoring
from quire.frontend.pooling.tasks import Tasks

logger = get_logger(__name__)


class PoolingServices:
    """The services of one server.

    Args:
        config: has the template that writes pairs of texts. The checkpoint's own is for conversations.
        announces: log what may be missing.

    Attributes:
        inputs, encoding, tasks, pairs, pair_writer: for services of other protocols.
    """

    def __init__(
        self, engine: AsyncLLM, config: ChatConfig, conversations: Conversations, *, announces: bool = True
    ) -> None:
        self.inputs = Inputs(engine, conversations)
        self.encoding = Encoding(engine)
        self.tasks = Tasks(engine)
        template, pooling = config.read_chat_template(), engine.config.pooling
        if announces and template is None and pooling is not None and pooling.token_scores is not None:
            logger.warning(
                "scores are read from the logits of tokens, and no --chat-template writes a query and a document as "
                "the model was trained to read them: without one, they are joined"
            )
        self.pair_writer = engine.pair_writer(template)
        self.pairs = PairScoring(engine, self.inputs, self.encoding, self.tasks, self.pair_writer)
        self.embeddings = Embeddings(engine, self.inputs, self.encoding, self.tasks)
        self.pooled = PooledOutputs(engine, self.inputs, self.encoding, self.tasks, Plugin.of(engine))
        self.classifications = Classifications(engine, self.inputs, self.encoding, self.tasks)
        self.scoring = Scoring(engine, self.pairs)
