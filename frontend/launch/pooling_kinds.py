"""What classes of models make, by their names."""

from typing import NamedTuple

from quire.core.config.pooling import Conversion
from quire.core.config.resolved import ModelSpec


class Kind(NamedTuple):
    """What a class of models makes.

    Attributes:
        output: "none" is tokens.
        by_token: an output for each token alone.
        has_steps: the outputs that count are those of the tokens behind each step.
        activates: logits become probabilities unless a request says otherwise.
        num_classes: where config.json does not say.
        scores_vocabulary: each token has a score of each token of the vocabulary.
        projection: the linear layer that makes vectors of tokens alone, of their hidden states.
        ranks_lists: vectors of tokens alone, of those behind a query and its documents.
    """

    output: Conversion
    by_token: bool = False
    has_steps: bool = False
    activates: bool = True
    num_classes: int = 2  # as in Transformers
    scores_vocabulary: bool = False
    projection: str | None = None
    ranks_lists: bool = False


KINDS: dict[str, Kind] = {
    "ForCausalLM": Kind("none"),
    "ForConditionalGeneration": Kind("none"),
    "ChatModel": Kind("none"),
    "LMHeadModel": Kind("none"),
    "EncoderDecoderModel": Kind("none"),
    "ForTextEncoding": Kind("embed"),
    "EmbeddingModel": Kind("embed"),
    "ForMaskedLM": Kind("embed", scores_vocabulary=True),
    "ForSequenceClassification": Kind("classify"),
    "ForTokenClassification": Kind("classify", by_token=True),
    "ClassificationModel": Kind("classify"),
    "ForProcessRewardModel": Kind("classify", by_token=True, has_steps=True),
    "ForRewardModel": Kind("classify", by_token=True, activates=False, num_classes=1),
    "ForRewardModeling": Kind("classify", activates=False, num_classes=1),
    "RewardModel": Kind("classify", by_token=True, activates=False, num_classes=1),
    "ColBERT": Kind("embed", projection="linear"),
    "ForRetrieval": Kind("embed", projection="embedding_proj_layer"),
    "ForRanking": Kind("embed", ranks_lists=True),
    "Model": Kind("embed"),
}
"""By the ending of a class's name, as Transformers' auto classes have it; the first that fits counts."""


def kind_of(spec: ModelSpec) -> Kind:
    """What the checkpoint's class makes; tokens, if no name fits."""
    return next((kind for ending, kind in KINDS.items() if spec.architecture.endswith(ending)), Kind("none"))
