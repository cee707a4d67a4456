"""Settles the parameters of requests for vectors, by what the model serves."""

from collections.abc import Sequence

from msgspec.structs import replace

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ParameterError
from quire.core.wire.pooling import CLASSIFY, EMBED, Pooling, PoolingMethod, PoolingTask
from quire.core.wire.pooling_params import PoolingParams
from quire.frontend.requests.context_limit import ContextLimit

_METHODS: dict[str, PoolingMethod] = {
    "CLS": "cls",
    "LAST": "last",
    "MEAN": "mean",
    "SPLADE_MAX": "splade_max",
    "SPLADE_SUM": "splade_sum",
}
_FLAGS = {
    "embed": "--convert embed",
    "token_embed": "--convert embed",
    "classify": "--convert classify",
    "token_classify": "--convert classify",
}
_USED = {
    "embed": ("use_activation", "dimensions"),
    "classify": ("use_activation",),
    "token_embed": ("use_activation", "dimensions", "late_chunking_params", "step_tag_id"),
    "token_classify": ("use_activation", "step_tag_id", "returned_token_ids"),
    "embed&token_classify": ("use_activation", "dimensions"),
}
_OPTIONAL = ("use_activation", "dimensions", "late_chunking_params", "step_tag_id", "returned_token_ids")


def lacks_task(task: str, served: Sequence[str], model: str) -> ParameterError:
    """The error for a request for a task that the model does not serve."""
    flag = f"; start it with {_FLAGS[task]} for {task}" if task in _FLAGS else ""
    return ParameterError(f"{model} serves {', '.join(served)}, and not {task}{flag}.", param="task")


def lacks_text(served: Sequence[str], model: str, *, is_encoder: bool) -> ParameterError:
    """The error for a request for text to a model that serves other tasks."""
    remedy = "an encoder generates no text" if is_encoder else "start it with --runner generate for generate"
    return ParameterError(f"{model} serves {', '.join(served)}, and not generate; {remedy}.", param="model")


class PoolingInput:
    """Makes complete and valid parameters for one model.

    Args:
        spec: how the model makes vectors; None: it generates.
        model: its name, for messages.
        is_encoder: the model cannot generate.
    """

    def __init__(self, spec: PoolingSpec | None, model: str, *, is_encoder: bool) -> None:
        self._spec = spec
        self._is_encoder = is_encoder
        self._model = model

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the model serves, the usual one first."""
        return ("generate",) if self._spec is None else tuple(self._spec.tasks)

    def check_generates(self) -> None:
        """Raises ParameterError if the model makes vectors instead of text."""
        if self._spec is not None:
            raise lacks_text(self.tasks, self._model, is_encoder=self._is_encoder)

    def task_of(self, params: PoolingParams) -> PoolingTask:
        """The task of a request.

        Raises:
            ParameterError: the model does not serve it.
        """
        if self._spec is None or (params.task is not None and params.task not in self._spec.tasks):
            raise lacks_task(params.task or "embed", self.tasks, self._model)
        return params.task or self._spec.tasks[0]

    def resolve(self, params: PoolingParams) -> Pooling:
        """The parameters in the workers' form, with the model's defaults.

        Raises:
            ParameterError: the model does not serve the task, or a parameter has no use for it, by name.
        """
        task = self.task_of(params)
        spec = self._spec
        assert spec is not None
        for name in _OPTIONAL:
            if getattr(params, name) is not None and name not in _USED[task]:
                raise ParameterError(f"{name} has no use for the task {task}; leave it out.", param=name)
        if task == "embed&token_classify":
            activation = params.use_activation
            text = self.resolve(PoolingParams(activation, params.dimensions, task="embed"))
            return replace(self.resolve(PoolingParams(activation, task="token_classify")), text=text)
        own = spec.token_heads.get(task)
        default = spec.use_activation or own is not None
        activation = default if params.use_activation is None else params.use_activation
        head = task if own is not None else EMBED if spec.embeds else CLASSIFY
        if task in ("embed", "classify"):
            return Pooling(_METHODS[spec.sequence], head, activation, self._dimensions(spec, params))
        chunks = params.late_chunking_params
        step_tag_id = self._step_tag(spec, params)
        if chunks is not None and (step_tag_id is not None or spec.ranking is not None):
            remedy = "leave step_tag_id out" if spec.ranking is None else "this model has none; leave them out"
            raise ParameterError(
                f"late_chunking_params need the vectors of all tokens; {remedy}.",
                param="late_chunking_params",
            )
        return Pooling(
            "all",
            head,
            activation,
            self._dimensions(spec, params) if task == "token_embed" else None,
            step_tag_id,
            self._columns(spec, params),
            None if chunks is None else chunks.chunk_size,
            without_first=None if own is None else own.without_first,
            without_last=None if own is None else own.without_last,
            is_flat=own is not None and own.is_flat,
            tag_ids=[] if spec.ranking is None else [spec.ranking.document, spec.ranking.query],
        )

    def longest_prompt(self, pooling: Pooling, limit: ContextLimit) -> int | None:
        """The most tokens of a prompt; None for no limit, where long ones are computed in parts."""
        spec = self._spec
        if spec is None or not spec.enable_chunked_processing or pooling.method == "all":
            return limit.longest_prompt
        return spec.max_embed_len

    def _dimensions(self, spec: PoolingSpec, params: PoolingParams) -> int | None:
        asked = params.dimensions
        if asked is None:
            return spec.dimensions
        if spec.matryoshka is None:
            raise ParameterError(
                f"{self._model} has vectors of {spec.embedding_size} dimensions alone; leave dimensions out. If parts "
                "of its vectors are vectors too, start it with --hf-overrides '{\"is_matryoshka\": true}'.",
                param="dimensions",
            )
        if not 1 <= asked <= spec.embedding_size:
            raise ParameterError(
                f"dimensions must be from 1 to {spec.embedding_size}, got {asked}.", param="dimensions"
            )
        if spec.matryoshka and asked not in spec.matryoshka:
            known = ", ".join(map(str, spec.matryoshka))
            raise ParameterError(f"dimensions must be one of {known}, got {asked}.", param="dimensions")
        return asked

    def _step_tag(self, spec: PoolingSpec, params: PoolingParams) -> int | None:
        if spec.token != "STEP":
            for name in ("step_tag_id", "returned_token_ids"):
                if getattr(params, name) is not None:
                    raise ParameterError(
                        f'{name} needs STEP pooling: start with --pooler-config \'{{"tok_pooling_type": "STEP"}}\'.',
                        param=name,
                    )
            return None
        return spec.step_tag_id if params.step_tag_id is None else params.step_tag_id

    def _columns(self, spec: PoolingSpec, params: PoolingParams) -> list[int] | None:
        """The places of the tokens that a request names among those whose logits the model's head makes."""
        asked = params.returned_token_ids
        if asked is None or asked == spec.returned_token_ids:
            return None
        known = spec.returned_token_ids or []
        if not set(asked) <= set(known):
            made = f"the logits of {', '.join(map(str, known))}" if known else "no logits of tokens"
            raise ParameterError(
                f"The model makes {made}; name other tokens in returned_token_ids of --pooler-config.",
                param="returned_token_ids",
            )
        return [known.index(token_id) for token_id in asked]
