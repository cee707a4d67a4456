"""The methods of `LLM` for vectors, classes and scores."""

from collections.abc import Sequence
from typing import Any

from quire.core.config.pooling import PoolingSpec
from quire.core.errors import ParameterError
from quire.core.wire.pooling import PoolingTask
from quire.core.wire.pooling_params import PoolingParams, check_task
from quire.frontend.io_processors.plugin import Plugin
from quire.frontend.offline.arguments import LoRAs, adapters_of, one_each, prompts_of
from quire.frontend.offline.engine import LLMEngine
from quire.frontend.offline.scores import Scorer, pairs_of
from quire.frontend.offline.vectors import VectorBatch, VectorRunner, VectorsOutput
from quire.frontend.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.frontend.progress import MakeBar, open_progress
from quire.frontend.requests.named_prompts import named_prompt, num_lead_tokens
from quire.frontend.requests.prompt import DataPrompt, PromptLike
from quire.frontend.requests.ranked_lists import joined
from quire.frontend.requests.request_fields import check_params
from quire.frontend.requests.task_adapters import ChosenTask, choose_task
from quire.frontend.requests.tokenization import Tokenization
from quire.frontend.text.chat_template import read_template

Prompts = PromptLike | Sequence[PromptLike]
Params = PoolingParams | Sequence[PoolingParams] | None


class VectorLLM:
    """A model whose output is vectors, classes or scores: the part of `LLM` that a generating model refuses.

    Args:
        llm_engine: the engine, and the thread that talks to it.
        chat_template: the text of the template for pairs that bring none; None: the tokenizer joins them.
    """

    def __init__(self, llm_engine: LLMEngine, chat_template: str | None) -> None:
        self.llm_engine = llm_engine
        self._chat_template = chat_template
        self._vectors = VectorRunner(llm_engine.async_llm)
        self._scorer = Scorer(llm_engine.async_llm, self._vectors)
        self._plugin = Plugin.of(llm_engine.async_llm)

    def encode(
        self,
        prompts: Prompts | DataPrompt,
        pooling_params: Params = None,
        *,
        use_tqdm: bool | MakeBar | None = None,
        lora_request: LoRAs = None,
        pooling_task: PoolingTask | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
        adapter_task: str | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """The output of a task for each prompt, in the order of the prompts. Equal prompts are computed once.

        Args:
            prompts: one or many; each a text, a list of token ids, a `TextPrompt` or a `TokensPrompt`. Or
                `{"data": ...}` for the plugin that `io_processor_plugin` names, with `pooling_task="plugin"`: the one
                output has what the plugin makes.
            pooling_params: for all prompts, or one each.
            pooling_task: one of `supported_tasks`; None for that of the parameters, or else the model's first.
            use_tqdm: show a progress bar; None shows it only on a terminal.
            lora_request: an adapter for all prompts, or one each; needs `enable_lora=True`.
            tokenization_kwargs: see `Tokenization.read`.
            prompt_name: of the texts that the checkpoint has for uses, as sentence-transformers stores them, the one to
                put before each text; None: none.
            adapter_task: a task of a checkpoint that has an adapter for each, as Jina's embedders; the prompt that it
                has for the task is put before each text. None: that of the weights as they are loaded.

        Raises:
            ParameterError: a prompt or parameter is wrong, or the model does not serve the task.
        """
        check_task(pooling_task)
        tokenization = Tokenization.read(tokenization_kwargs)
        if pooling_task == "plugin" or (isinstance(prompts, dict) and "data" in prompts):
            return [self._by_plugin(prompts, pooling_params, pooling_task, lora_request, tokenization, use_tqdm)]
        chosen = self._choose(prompt_name, adapter_task, lora_request)
        spec = self.llm_engine.config.pooling
        many = joined(spec, prompts_of(prompts), tokenization.truncation)
        if prompt_name is not None:
            many = prompted(many, prompt_name, spec)
        else:
            many = [chosen.before + each if isinstance(each, str) else each for each in many]
        if not many:
            raise ParameterError("prompts must hold at least one prompt.", param="prompts")
        params = one_each("pooling_params", pooling_params, PoolingParams, len(many), PoolingParams())
        if pooling_task is not None:
            params = [_for_task(each, pooling_task) for each in params]
        adapters = adapters_of(lora_request, len(many)) if chosen.adapter is None else [chosen.adapter] * len(many)
        lead = num_lead_tokens(self.llm_engine.async_llm.async_tokenizer, spec, chosen.before)
        return self._encode(VectorBatch(many, params, adapters, tokenization, lead), use_tqdm)

    def _choose(self, prompt_name: str | None, adapter_task: str | None, lora_request: LoRAs) -> ChosenTask:
        """The text before each prompt, and the adapter among the weights. Raises ParameterError."""
        spec = self.llm_engine.config.pooling
        if adapter_task is None:
            return ChosenTask(before="" if prompt_name is None else named_prompt(spec, prompt_name))
        if prompt_name is not None or lora_request is not None:
            raise ParameterError(
                "adapter_task brings a prompt and an adapter; leave prompt_name and lora_request out.",
                param="adapter_task",
            )
        return choose_task(spec, adapter_task, "adapter_task")

    def _by_plugin(
        self,
        given: Any,
        pooling_params: Params,
        task: str | None,
        lora_request: LoRAs,
        tokenization: Tokenization,
        use_tqdm: bool | MakeBar | None,
    ) -> PoolingRequestOutput[Any]:
        if self._plugin is None:
            raise ParameterError(
                "There is no plugin: name one with io_processor_plugin, or leave data and the task plugin out.",
                param="pooling_task",
            )
        if task != "plugin" or not isinstance(given, dict) or set(given) != {"data"}:
            raise ParameterError(
                'A plugin takes {"data": ...} as prompts, with pooling_task="plugin".', param="pooling_task"
            )
        many = self.llm_engine.run(self._plugin.prompts(given["data"], None))
        params = one_each("pooling_params", pooling_params, PoolingParams, len(many), PoolingParams())
        merged = [self._plugin.params(each.clone()) for each in params]
        outputs = self._encode(VectorBatch(many, merged, adapters_of(lora_request, len(many)), tokenization), use_tqdm)
        answer = self.llm_engine.run(self._plugin.answer(outputs, None))
        num_cached_tokens = getattr(answer, "num_cached_tokens", 0)
        return PoolingRequestOutput(
            request_id="", outputs=answer, prompt_token_ids=[], num_cached_tokens=num_cached_tokens
        )

    def embed(
        self,
        prompts: Prompts,
        *,
        use_tqdm: bool | MakeBar | None = None,
        pooling_params: Params = None,
        lora_request: LoRAs = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        prompt_name: str | None = None,
        adapter_task: str | None = None,
    ) -> list[EmbeddingRequestOutput] | list[VectorsOutput]:
        """The vector of each prompt. Of a model that makes vectors of tokens first, those, as `encode` returns them.

        Arguments and errors are those of `encode`.
        """
        by_token = self._tasks[0] == "token_embed"
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_embed" if by_token else "embed",
            tokenization_kwargs=tokenization_kwargs,
            prompt_name=prompt_name,
            adapter_task=adapter_task,
        )
        return outputs if by_token else [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params = None,
        use_tqdm: bool | MakeBar | None = None,
        lora_request: LoRAs = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the classes of each prompt; arguments and errors are those of `encode`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
        )
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool | MakeBar | None = None,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRAs = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair: a model with one class reads both texts; vectors of texts are compared by their
        cosine, those of tokens as ColBERT does (MaxSim).

        Args:
            data_1: a text for all of `data_2`, or one for each.
            pooling_params: `extra_kwargs` may hold `max_tokens_per_query`, `max_tokens_per_doc` and
                `chat_template_kwargs`.
            chat_template: writes a pair as messages of the roles `query` and `document`; None for the one of `LLM`.

        Other arguments and errors are those of `encode`.
        """
        first, second = pairs_of(data_1, data_2)
        [adapter] = adapters_of(lora_request, 1)
        params = check_params(pooling_params or PoolingParams(), PoolingParams)
        template = self._chat_template if chat_template is None else read_template(chat_template)
        with open_progress("Scoring", None, use_tqdm) as progress:
            return self.llm_engine.run(
                self._scorer.score(
                    first,
                    second,
                    params,
                    adapter,
                    Tokenization.read(tokenization_kwargs),
                    template,
                    lambda output: progress.advance(len(output.prompt_token_ids)),
                )
            )

    def reward(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        use_tqdm: bool | MakeBar | None = None,
        lora_request: LoRAs = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[VectorsOutput]:
        """The rewards of each prompt's tokens, or of those at the ends of steps; of a model that rewards whole texts,
        that one. Arguments and errors are those of `encode`.
        """
        by_token = "token_classify" in self._tasks or "classify" not in self._tasks
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_classify" if by_token else "classify",
            tokenization_kwargs=tokenization_kwargs,
        )

    @property
    def _tasks(self) -> tuple[str, ...]:
        return self.llm_engine.get_supported_tasks()

    def _encode(self, batch: VectorBatch, use_tqdm: bool | MakeBar | None) -> list[VectorsOutput]:
        with open_progress("Encoding", len(batch.prompts), use_tqdm) as progress:
            return self.llm_engine.run(
                self._vectors.run(batch, lambda output: progress.advance(len(output.prompt_token_ids)))
            )


def prompted(prompts: Sequence[PromptLike], name: str, spec: PoolingSpec | None) -> list[PromptLike]:
    """The texts with one of the checkpoint's prompts before each.

    Raises:
        ParameterError: the checkpoint has none of this name, or a prompt is no text.
    """
    before = named_prompt(spec, name)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise ParameterError("prompt_name goes before texts; leave it out for token ids.", param="prompt_name")
    return [before + text for text in texts]


def _for_task(params: PoolingParams, task: PoolingTask) -> PoolingParams:
    """The parameters with a task. Raises ParameterError if they have another."""
    if params.task not in (None, task):
        raise ParameterError(f"pooling_params are for the task {params.task}, not {task}; leave it out.", param="task")
    params = params.clone()
    params.task = task
    return params
