"""The outputs that workers compute from a prompt's hidden states for requests without sampled tokens."""

from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify"]
"""A vector for a text, probabilities of a text's classes, and both of these for each of its tokens. The last one is a
text's vector and then a number for each token.
"""

PoolingMethod = Literal["last", "cls", "mean", "all", "splade_max", "splade_sum", "aligned"]
"""The hidden states that become the output: those of the prompt's last token, of its first, their mean, or of each.

With the last two, the output has a weight for each token of the vocabulary: log(1 + max(score, 0)), the largest one of
the prompt's tokens or their sum. They are SPLADE v2 (arXiv 2109.10086, equations 6 and 1).

"aligned" is no hidden state: it is how much each token of the decoder attends to each row of the encoder's input.
"""


class AlignmentHead(NamedTuple):
    """A head of a decoder's attention to its encoder, whose weights follow the input in time."""

    layer: int
    head: int


class Pooling(Struct, array_like=True, frozen=True):
    """The output of a request for vectors.

    Attributes:
        head: the head of the model through which the hidden states go, such as `EMBED` or `CLASSIFY`; None: none.
        activation: apply the head's activation: a vector's normalization, or the function that makes probabilities.
        dimensions: keep a vector's first elements; None keeps all.
        step_tag_id: with `all`, keep the vectors of tokens with this id; None keeps all.
        tag_ids: with `all`, keep the vectors of tokens with one of these ids; empty: keep all.
        columns: keep these elements of each vector, in this order; None keeps all.
        chunk_size: with `all`, tokens whose mean is one vector; None: each token has its own.
        num_lead_tokens: with `mean` and `aligned`, first tokens of the prompt that are left out.
        alignment_heads: with `aligned`, the heads whose mean is the output.
        num_rows: with `aligned`, the first rows of the encoder's input, which the output has.
        without_first: with `all`, a first token with this id has no vector; nor has a last one with `without_last`.
        is_flat: with `all`, a token's vector is one number, and a text has a list of numbers.
        text: with `is_flat`, the vector of the whole text, whose elements come before those numbers; None: there is
            none. Only encoders, which compute a prompt at once, have it.
    """

    method: PoolingMethod
    head: str | None = None
    activation: bool = True
    dimensions: int | None = None
    step_tag_id: int | None = None
    columns: list[int] | None = None
    chunk_size: int | None = None
    num_lead_tokens: int = 0
    without_first: int | None = None
    without_last: int | None = None
    is_flat: bool = False
    tag_ids: list[int] = []
    text: "Pooling | None" = None
    alignment_heads: list[AlignmentHead] = []
    num_rows: int = 0

    def without_lead(self, num_tokens: int) -> "Pooling":
        """The same, but a mean leaves the prompt's first tokens out."""
        if not num_tokens:
            return self
        if self.text is not None:
            return replace(self, text=self.text.without_lead(num_tokens))
        return replace(self, num_lead_tokens=num_tokens) if self.method == "mean" else self


EMBED = "embed"
CLASSIFY = "classify"
