"""Options: vectors, classes and scores as a model's output; and what was resolved of them and of the checkpoint."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from quire.core.config.task_adapters import TaskAdapters
from quire.core.wire.pooling import PoolingTask

Runner = Literal["generate", "pooling"]
Conversion = Literal["none", "embed", "classify"]
SequencePooling = Literal["CLS", "LAST", "MEAN", "SPLADE_MAX", "SPLADE_SUM"]
TokenPooling = Literal["ALL", "STEP"]
SentenceKind = Literal["vectors", "token vectors", "scores"]


class PoolerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vectors are made of hidden states; what is left out is as the checkpoint says.

    Raises:
        ValueError: two fields contradict each other, or one has no use.
    """

    task: PoolingTask | None = None  # of requests that name none
    pooling_type: SequencePooling | TokenPooling | None = None  # either of the next two
    seq_pooling_type: SequencePooling | None = None
    tok_pooling_type: TokenPooling | None = None
    use_activation: bool | None = None  # of requests that do not say
    dimensions: Annotated[int, Meta(ge=1)] | None = None  # of requests that do not say
    enable_chunked_processing: bool = False  # inputs longer than the model's context become the mean of their parts'
    max_embed_len: Annotated[int, Meta(ge=1)] | None = None  # tokens of such an input, at most
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    enable_flash_late_interaction: bool = True  # token vectors are compared without a kernel of its own either way

    def __post_init__(self) -> None:
        if self.logit_sigma == 0:
            raise ValueError("logit_sigma divides, and must not be 0")
        if self.pooling_type is not None and (self.seq_pooling_type or self.tok_pooling_type):
            raise ValueError("give pooling_type, or seq_pooling_type and tok_pooling_type")
        if self.max_embed_len is not None and not self.enable_chunked_processing:
            raise ValueError("max_embed_len needs enable_chunked_processing")

    @property
    def sequence(self) -> SequencePooling | None:
        """The way to one vector for a text, if the user chose it."""
        match self.pooling_type:
            case None | "ALL" | "STEP":
                return self.seq_pooling_type
            case chosen:
                return chosen

    @property
    def token(self) -> TokenPooling | None:
        """The choice of tokens that get vectors, if the user made it."""
        return self.pooling_type if self.pooling_type in ("ALL", "STEP") else self.tok_pooling_type


class DenseLayer(Struct, frozen=True, kw_only=True):
    """A linear layer behind the pooling, as sentence-transformers stores it."""

    folder: str  # inside the checkpoint's
    in_features: int
    out_features: int
    bias: bool = True
    activation: str  # a class of torch.nn.modules


class SentenceModel(Struct, frozen=True, kw_only=True):
    """The files of sentence-transformers in a checkpoint."""

    kind: SentenceKind = "vectors"
    pooling: SequencePooling | None = None
    pooling_fault: str | None = None  # why there is none, where the files ask for one
    normalizes: bool = False
    dense: list[DenseLayer] = []
    max_seq_length: int | None = None
    do_lower_case: bool = False
    prompts: dict[str, str] = {}  # texts before an input, by the name of its use
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    includes_prompt: bool = True  # in the mean of a text's tokens, where a named prompt is before it
    pair_template: str | None = None  # the name of the chat template that writes pairs; None: the tokenizer does
    template_variables: dict[str, Any] = {}  # for it
    score_tokens: list[int] = []  # the score is the logit of the last, less that of the first if there are two
    score_activation: str | None = None  # makes probabilities of scores: a class of torch.nn.modules


class TokenHead(Struct, frozen=True, kw_only=True):
    """A linear layer for the vectors of tokens, in a file of its own.

    Attributes:
        file: inside the checkpoint's folder.
        activation: "normalize", or a class of torch.nn.modules.
        without_first, without_last: as of `Pooling`.
        is_flat: as of `Pooling`.
    """

    file: str
    activation: str
    without_first: int | None = None
    without_last: int | None = None
    is_flat: bool = False


class TokenScores(Struct, frozen=True, kw_only=True):
    """Classes that are tokens of the vocabulary: a language-model head's rows make the logits.

    Attributes:
        token_ids: one class each; with `as_difference`, "no" and "yes", whose difference is the one logit.
    """

    token_ids: list[int]
    as_difference: bool = False


RANKING_TOKENS = ("<|embed_token|>", "<|rerank_token|>")
"""The tokens behind each document, and behind the query, in the prompts of Jina's list rerankers."""


class RankingTokens(Struct, frozen=True, kw_only=True):
    """The ids of `RANKING_TOKENS`, whose vectors are those of a prompt's documents and query."""

    document: int
    query: int


class PoolingSpec(Struct, frozen=True, kw_only=True):
    """A model whose output is vectors: what it can do, and how.

    Attributes:
        tasks: those that the model serves, the first one for requests that name none.
        sequence, token: the ways from hidden states to vectors.
        use_activation: for requests that do not say.
        classes: the names of the classes, by number; empty for a model without.
        score_activation: makes probabilities of logits: a class of torch.nn.modules, or "auto" for a sigmoid of one
            class and a softmax of several.
        token_scores: None: the checkpoint has a classifier.
        token_heads: the heads of tasks with one of their own.
        projection: the name of a linear layer among the weights, from hidden states to vectors; None: there is none.
        ranking: of a model that reads a query and all its documents in one prompt; None: it does not.
        embedding_size: elements of a vector.
        fills_to: texts get tokens of padding up to this number, which the others see; 0: none.
        task_adapters: those among the weights; None: there are none.
        includes_prompt: the mean of a text's tokens has those of a named prompt before it.
        joins_texts: a pair is one text for the model, where no template writes it.
        pair_template, template_variables: as in `SentenceModel`.
        io_processor_plugin: the name of the plugin that reads and answers clients' own data; None: none.
        matryoshka: the numbers of leading elements that are vectors too; None: none; empty: any.
        sources: where the choices come from, for the log.
    """

    tasks: list[PoolingTask]
    sequence: SequencePooling
    token: TokenPooling = "ALL"
    use_activation: bool = True
    classes: list[str] = []
    score_activation: str = "auto"
    token_scores: TokenScores | None = None
    token_heads: dict[PoolingTask, TokenHead] = {}
    projection: str | None = None
    ranking: RankingTokens | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    embedding_size: int
    fills_to: int = 0
    matryoshka: list[int] | None = None
    dimensions: int | None = None
    dense: list[DenseLayer] = []
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    similarity: str = "cosine"
    do_lower_case: bool = False
    includes_prompt: bool = True
    joins_texts: bool = False
    pair_template: str | None = None
    template_variables: dict[str, Any] = {}
    io_processor_plugin: str | None = None
    task_adapters: TaskAdapters | None = None
    sources: dict[str, str] = {}

    @property
    def embeds(self) -> bool:
        """True if the model makes vectors of texts or tokens, False if it makes classes."""
        return "embed" in self.tasks or "token_embed" in self.tasks

    @property
    def is_sparse(self) -> bool:
        """True if a text's vector has a weight for each token of the vocabulary, most of them 0."""
        return self.sequence in ("SPLADE_MAX", "SPLADE_SUM")

    def describe(self) -> str:
        """One line for people."""
        parts = [f"serves {', '.join(self.tasks)}"]
        if not {"embed", "classify"}.isdisjoint(self.tasks):
            parts.append(f"pooling {self.sequence}")
        if self.token != "ALL":
            parts.append(f"tokens {self.token}")
        if self.embeds:
            parts.append(
                ("sparse " if self.is_sparse else "")
                + f"vectors of {self.embedding_size}"
                + (", normalized" if self.use_activation else "")
            )
        if self.classes:
            parts.append(f"{len(self.classes)} classes" if len(self.classes) > 1 else "one score")
        if self.task_adapters is not None:
            parts.append(self.task_adapters.describe())
        if self.prompts:
            parts.append(f"prompts for {', '.join(self.prompts)}")
        if self.pair_template is not None:
            parts.append(f"pairs by the chat template {self.pair_template}")
        if self.io_processor_plugin is not None:
            parts.append(f"plugin {self.io_processor_plugin}")
        found = ", ".join(f"{name} from {source}" for name, source in self.sources.items())
        return "; ".join(parts) + (f" ({found})" if found else "")
