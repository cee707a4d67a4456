"""The place where linear layers meet adapters: low-rank weights of each, and the adapter of each token of a step.

`ModelContext.adapters` is this place, or None on a worker without adapters. A layer takes its part of it when it is
built. A step fills in the adapters of its tokens before each forward pass, and no layer passes them on. See LoRA,
arXiv:2106.09685; DoRA, arXiv:2402.09353; (IA)³, arXiv:2205.05638.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.config.lora import AdapterOptions
from quire.core.errors import ModelLoadError
from quire.executor.layers.experts.shape import ExpertShape
from quire.executor.weights.quantization.scheme import LinearPart
from quire.executor.weights.readers import Shard, StoredRows
from quire.ops.activations import Activation
from quire.ops.backend import Backend
from quire.ops.linear import LowRankWeights


class AdapterLimits(NamedTuple):
    """The adapters that a worker has memory for.

    Attributes:
        max_rank: of each adapter.
        targets: ends of the names of layers that take adapters; None: all layers.
    """

    num_adapters: int
    max_rank: int
    targets: Sequence[str] | None = None

    @classmethod
    def of(cls, options: AdapterOptions | None) -> "AdapterLimits | None":
        """Returns the adapters that a model has memory for by `EngineConfig.adapters`; None: it takes none."""
        return None if options is None else cls(options.max_adapters, options.max_rank, options.targets)


class AdapterWeight(NamedTuple):
    """One adapter's weights for one layer, of all ranks together.

    The layer's outputs become `factor * (W x + b a x) + bias`, where the factor makes each row of the weight as long as
    `magnitude` says. With `out_factors`, they become `out_factors * (W x + b a x + bias)`, and with `in_factors`, x is
    multiplied by these first.

    Attributes:
        a: [rank, in].
        b: [out, rank], multiplied by the adapter's scale.
        magnitude: [out]; None: the factor is 1.
        bias: [out], instead of the layer's own; None: that stays.
        added_bias: [out], besides; None: nothing.
        out_factors: [out], instead of a `magnitude`; None: 1.
        in_factors: [in]; None: 1.
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None
    bias: Tensor | None = None
    added_bias: Tensor | None = None
    out_factors: Tensor | None = None
    in_factors: Tensor | None = None


class BaseLayer(NamedTuple):
    """What an adapter's layer is without adapters, of all ranks together.

    Attributes:
        locate: finds the layer in the checkpoint; None: it has no place of its own there.
        read_weight: reads the numbers that the layer multiplies with, [out, in].
        read_bias: reads the bias, [out]; None: there is none.
        is_table: the layer's inputs are numbers of rows, which it looks up in its weight; see `add_rows`.
        shares: the name of the table whose weight the layer has; None: it has one of its own.
        scale: of a table's outputs.
        meets_past: the weight is multiplied with what earlier tokens have left in the cache, too.
        read_stored: reads the weight as it is in the file, if that may differ; None: it does not.
        is_label_head: the layer computes labels in float32, and an adapter may replace it whole.
    """

    part: LinearPart
    in_features: int
    has_bias: bool
    locate: Callable[[], StoredRows | None]
    read_weight: Callable[[], Tensor]
    read_bias: Callable[[], Tensor | None]
    is_table: bool = False
    shares: str | None = None
    scale: float = 1.0
    meets_past: bool = False
    read_stored: Callable[[], Tensor] | None = None
    is_label_head: bool = False

    def most_ranks(self, limits: AdapterLimits) -> int:
        """Ranks that an adapter may have in this layer."""
        return max(limits.max_rank, self.part.out_features) if self.is_label_head else limits.max_rank


class PreparedWeight(NamedTuple):
    """A rank's part of an adapter's weights for one layer, ready for any slot.

    Attributes:
        number: the layer's, among those of the product.
        a: [rank, this rank's inputs].
        b: [rank, this rank's outputs].
        factor, shift: [this rank's outputs]; None: 1 and 0.
        in_factors: [this rank's inputs]; None: 1.
    """

    layer: "LayerAdapters"
    number: int
    a: Tensor
    b: Tensor
    factor: Tensor | None
    shift: Tensor | None
    in_factors: Tensor | None = None


class ExpertNames(NamedTuple):
    """The names of the layers of a mixture's experts, for adapters that have all experts in one tensor.

    Attributes:
        module: the mixture's.
        own: the indices of this rank's experts.
        names: of each of them, its layers' names: gates and ups, or ups alone, and the layer after them.
        is_interleaved: gates and ups alternate in the checkpoint.
    """

    module: str
    shape: ExpertShape
    own: list[int]
    names: list[list[str]]
    is_interleaved: bool


class LayerAdapters:
    """The low-rank weights that all adapters add to one product, which may be of several layers with the same input.

    They stay in place, so a recorded step reads those that were loaded last. A layer without weights for an adapter has
    zeros.

    Attributes:
        bases: the layers, in order.
        is_used: an adapter has weights for the product.
    """

    def __init__(
        self,
        place: "Adapters",
        bases: Sequence[BaseLayer],
        in_shards: Sequence[Shard],
        sizes: Sequence[int],
        *,
        has_bias: bool,
        weights: LowRankWeights | None = None,
    ) -> None:
        """Takes as `sizes` the number of each part's outputs on this rank, which may be more than its shard has.

        `has_bias`: this rank adds the layers' biases. `weights` are the memory, of layers that take products alone.
        """
        self._place = place
        self.bases = bases
        self._in_shards = in_shards
        self._has_bias = has_bias
        self._takes_factors = weights is None
        self._dtype = torch.float32 if bases[0].is_label_head else None
        self._max_rank = bases[0].most_ranks(place.limits)
        if weights is None:
            num_adapters, rank = place.limits.num_adapters, self._max_rank
            in_features = sum(shard.stop - shard.start for shard in in_shards)
            a, b = (num_adapters, len(bases) * rank, in_features), (num_adapters, rank, sum(sizes))
            ranks = place.zeros(num_adapters, dtype=place.index_dtype)
            of_a, of_b = (place.zeros(*shape, dtype=self._dtype) for shape in (a, b))
            weights = LowRankWeights(of_a, of_b, tuple(sizes), ranks)
        self._weights = weights
        self._inputs: LowRankWeights | None = None  # their factors are those of the layer's inputs
        if not place.has_memory and self._takes_factors:
            self._add_factors()  # so that the memory for those of a later adapter is counted
        self.is_used = False

    @property
    def names(self) -> list[str]:
        """The names of the layers, in order."""
        return [base.part.name for base in self.bases]

    @property
    def has_factors(self) -> bool:
        """True if an adapter has changed lengths of rows, or biases."""
        return self._weights.factors is not None

    @property
    def scales_inputs(self) -> bool:
        """True if an adapter has factors of the inputs."""
        return self._inputs is not None

    def scale(self, x: Tensor) -> Tensor:
        """Returns the inputs `x`, multiplied by the factors of each token's adapter."""
        if self._inputs is None or not self._place.is_active:
            return x
        ops = self._place.ops
        return ops.add_low_rank(x[:, :1], ops.join([x]), self._inputs, self._place.tokens(len(x)))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds the products of `x` with each token's adapter to `out`, perhaps in place."""
        if not self.is_used or not self._place.is_active:
            return out
        return self._place.ops.add_low_rank(x, out, self._weights, self._place.tokens(len(x)))

    def add_gated(self, x: Tensor, out: Tensor, activation: Activation) -> Tensor:
        """Returns `activate_and_mul` of the sums of `add`, which are gates and ups."""
        ops = self._place.ops
        if not self.is_used or not self._place.is_active:
            return ops.activate_and_mul(out, activation)
        return ops.gated_low_rank(x, out, self._weights, self._place.tokens(len(x)), activation)

    def add_rows(self, index: Tensor, out: Tensor, is_elsewhere: Tensor | None = None) -> Tensor:
        """Adds the rows at `index` [num_tokens] int64 of each token's adapter to `out`, perhaps in place.

        So does a layer that is a table of rows: its inputs have a one in the place of the row, and zeros.
        `is_elsewhere` [num_tokens] bool: another rank adds the row.
        """
        if not self.is_used or not self._place.is_active:
            return out
        adapters, (a, b, sizes, ranks, *_) = self._place.tokens(len(index)), self._weights
        if is_elsewhere is not None:
            adapters = adapters.masked_fill(is_elsewhere, -1)
            index = index.clamp(max=a.shape[2] - 1)  # a rank's last rows may be padding
        inner = a[adapters.clamp(min=0), :, index]
        same = torch.eye(a.shape[1], dtype=a.dtype, device=a.device).repeat(len(a), 1, 1)
        return self._place.ops.add_low_rank(inner, out, LowRankWeights(same, b, sizes, ranks), adapters)

    def prepare(self, number: int, weight: AdapterWeight, dtype: torch.dtype) -> PreparedWeight:
        """Returns this rank's part of an adapter's weight for the layer with a number, its low-rank part in `dtype`.

        Raises:
            ModelLoadError: it has another shape than the layer, or values that are no numbers.
        """
        base, dtype = self.bases[number], self._dtype or dtype
        self._check(base, weight)
        part, weight = base.part, _in_float(weight)
        factor, shift = weight.out_factors, None
        if factor is not None and (weight.bias is not None or weight.added_bias is not None):
            raise ModelLoadError(
                f"The adapter has factors (IA³) and a bias for {base.part.name}: train it without biases."
            )
        if factor is None:
            factor = None if weight.magnitude is None else _row_factors(base, weight)
            shift = _shift(base, weight, factor) if self._has_bias else None
        a = torch.cat([weight.a[:, shard.start : shard.stop] for shard in self._in_shards], dim=1)
        b = weight.b * base.scale
        if part.shard.dim == 0:
            own = slice(part.shard.start, part.shard.stop)
            b, factor, shift = b[own], factor if factor is None else factor[own], shift if shift is None else shift[own]
        inputs = weight.in_factors
        if inputs is not None:
            inputs = torch.cat([inputs[shard.start : shard.stop] for shard in self._in_shards])
        prepared = PreparedWeight(self, number, a.to(dtype), b.T.to(dtype).contiguous(), factor, shift, inputs)
        if not all(each is None or torch.isfinite(each).all() for each in prepared[2:]):
            raise ModelLoadError(
                f"The adapter's weights for {part.name} are NaN or infinite, or become so in "
                f"{str(dtype).removeprefix('torch.')} (--lora-dtype); train or save it again."
            )
        return prepared

    def put(self, adapter: int, weight: PreparedWeight) -> None:
        """Copies a prepared weight to an adapter's place."""
        self.is_used = True
        if (weight.factor is not None or weight.shift is not None) and self._weights.factors is None:
            self._add_factors()
        a, b, sizes, ranks, factors, shifts = self._weights
        rank, start, size = len(weight.a), sum(sizes[: weight.number]), weight.b.shape[1]
        first = weight.number * self._max_rank
        a[adapter, first : first + rank] = weight.a.to(a.device)
        b[adapter, :rank, start : start + size] = weight.b.to(b.device)
        if ranks is not None:
            ranks[adapter] = max(int(ranks[adapter]), rank)
        for there, values in ((factors, weight.factor), (shifts, weight.shift)):
            if there is not None and values is not None:
                there[adapter, start : start + size] = values.to(there.device)
        if weight.in_factors is not None:
            if self._inputs is None:
                self._inputs = self._factors_of_inputs()
            assert self._inputs.factors is not None
            self._inputs.factors[adapter] = weight.in_factors.to(self._inputs.factors.device)

    def clear(self, adapter: int) -> None:
        """Removes the weights of an adapter."""
        self._weights.a[adapter] = 0
        self._weights.b[adapter] = 0
        if self._weights.ranks is not None:
            self._weights.ranks[adapter] = 0
        if self._weights.factors is not None and self._weights.shifts is not None:
            self._weights.factors[adapter] = 1
            self._weights.shifts[adapter] = 0
        if self._inputs is not None and self._inputs.factors is not None:
            self._inputs.factors[adapter] = 1

    def _add_factors(self) -> None:
        """Makes room for factors and shifts that change nothing, as a step with other adapters may be running."""
        shape = len(self._weights.a), sum(self._weights.sizes)
        factors, shifts = (self._place.zeros(*shape, dtype=torch.float32) for _ in range(2))
        self._weights = self._weights._replace(factors=factors.fill_(1), shifts=shifts)

    def _factors_of_inputs(self) -> LowRankWeights:
        """Makes room for factors of inputs: those of the outputs of a layer that changes nothing else."""
        num_adapters, size = len(self._weights.a), self._weights.a.shape[2]
        zeros, shifts = self._place.zeros, self._place.zeros(num_adapters, size, dtype=torch.float32)
        nothing = zeros(num_adapters, 1, 1), zeros(num_adapters, 1, size)
        ranks = zeros(num_adapters, dtype=torch.int64)
        return LowRankWeights(*nothing, (size,), ranks, torch.ones_like(shifts), shifts)

    def _check(self, base: BaseLayer, weight: AdapterWeight) -> None:
        a, b, part, needed = weight.a, weight.b, base.part, base.in_features
        if not self._takes_factors and any(each is not None for each in weight[2:]):
            raise ModelLoadError(
                f"The adapter has a magnitude (DoRA), a bias or factors for {part.name}, which takes lora_A "
                "and lora_B alone. Merge it into its base model."
            )
        vectors = [each for each in weight[2:-1] if each is not None]
        if weight.in_factors is not None and (len(weight.in_factors) != needed or len(self.bases) > 1):
            beside = f", which {', '.join(self.names)} share" if len(self.bases) > 1 else ""
            raise ModelLoadError(
                f"The adapter's factors for the inputs of {part.name} are {len(weight.in_factors)}; the layer has "
                f"{needed} inputs{beside}. Factors of inputs are served for layers with inputs of their own."
            )
        fits = len(b) == part.out_features and a.shape[1] == needed and all(len(each) == len(b) for each in vectors)
        if a.shape[0] != b.shape[1] or not fits or len(a) > self._max_rank:
            raise ModelLoadError(
                f"The adapter's weights for {part.name} are {list(a.shape)} and {list(b.shape)}; the layer maps "
                f"{needed} inputs to {part.out_features} outputs, and ranks are at most {self._max_rank} "
                "(--max-lora-rank)."
            )


class Adapters:
    """The adapters of a rank's linear layers, numbered from 0, and those of the tokens of the current step.

    Attributes:
        layers: those that take adapters.
        experts: the names of those that are experts.
        index_dtype: of numbers of adapters, and of ranks.
        version: changes when a step with adapters runs other operations than before.
        is_active: some token of the current step has an adapter.
    """

    def __init__(self, limits: AdapterLimits, ops: Backend, dtype: torch.dtype, device: torch.device) -> None:
        self.limits = limits
        self.ops = ops
        self.version = 1
        self.is_active = False
        self._dtype = dtype
        self._device = device
        self.index_dtype = torch.int64
        self.layers: list[LayerAdapters] = []
        self.experts: list[ExpertNames] = []
        self._step: Tensor | None = None
        self._tokens: Tensor | None = None
        self._wanted: Tensor | None = None
        self._wanted_of_step: Tensor | None = None

    def without_memory(self) -> "Adapters":
        """Returns another place for the same adapters, whose weights are on torch's meta device."""
        return Adapters(self.limits, self.ops, self._dtype, torch.device("meta"))

    @property
    def has_memory(self) -> bool:
        """False for a place whose weights are only counted."""
        return self._device.type != "meta"

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns zeros on the device, in `dtype` or else the model's."""
        make = torch.zeros if self.has_memory else torch.empty
        return make(shape, dtype=dtype or self._dtype, device=self._device)

    # ------------------------------------------------------------------------------------------------------- layers

    def of_columns(self, bases: Sequence[BaseLayer], sizes: Sequence[int] | None = None) -> LayerAdapters | None:
        """Returns the weights for layers that have all inputs, and a shard of the outputs; None if these take none.

        `sizes` are the numbers of the layers' outputs on this rank; None: those of the shards.
        """
        sizes = sizes or [base.part.shard.stop - base.part.shard.start for base in bases]
        return self._added(bases, [Shard(1, 0, bases[0].in_features)], sizes, has_bias=True)

    def of_rows(self, base: BaseLayer, shards: Sequence[Shard], *, has_bias: bool) -> LayerAdapters | None:
        """Returns the weights for a layer that has shards of the inputs, and all outputs; None if it takes none.

        `has_bias`: this rank adds the layer's bias to the sum of all ranks.
        """
        return self._added([base], shards, [base.part.out_features], has_bias=has_bias)

    def add_experts(self, names: ExpertNames, layers: Sequence[LayerAdapters]) -> None:
        """Adds the layers of a mixture's experts."""
        self.experts.append(names)
        self.layers += layers

    def leave_out(self, layers: Collection[LayerAdapters]) -> None:
        """Removes layers that turn out to see other rows than the tokens of a step. None of them has been used."""
        self.layers = [layer for layer in self.layers if layer not in layers]

    def takes(self, *names: str) -> bool:
        """Returns True if one of the layers with these names takes adapters."""
        targets = self.limits.targets
        return targets is None or any(_ends_with(name, each) for name in names for each in targets)

    @torch.inference_mode()
    def prepare(self, weights: Mapping[str, AdapterWeight], dtype: torch.dtype | None = None) -> list[PreparedWeight]:
        """Returns this rank's part of an adapter of these `weights`, by the names of layers.

        Args:
            dtype: of the low-rank weights; None: the model's.

        Raises:
            ModelLoadError: a layer does not take adapters, or has another shape.
        """
        layers: dict[str, list[tuple[LayerAdapters, int]]] = defaultdict(list)
        for layer in self.layers:
            for number, name in enumerate(layer.names):
                layers[name].append((layer, number))
        unknown = sorted(weights.keys() - layers.keys())
        if unknown:
            raise ModelLoadError(f"The adapter has weights for {', '.join(unknown)}, which take no adapters here.")
        return [
            layer.prepare(number, weight, dtype or self._dtype)
            for name, weight in weights.items()
            for layer, number in layers[name]
        ]

    @torch.inference_mode()
    def put(self, adapter: int, weights: Sequence[PreparedWeight]) -> None:
        """Replaces an adapter, which no token of a step in flight has."""
        self.unload(adapter)
        before = self._operations
        for weight in weights:
            weight.layer.put(adapter, weight)
        self.version += self._operations != before

    def load(self, adapter: int, weights: Mapping[str, AdapterWeight]) -> None:
        """Replaces an adapter by `weights`; errors are those of `prepare`."""
        self.put(adapter, self.prepare(weights))

    @torch.inference_mode()
    def unload(self, adapter: int) -> None:
        """Removes an adapter's weights."""
        for layer in self.layers:
            if layer.is_used:
                layer.clear(adapter)

    # ------------------------------------------------------------------------------------------------------- a step

    def enter_step(self, tokens: Tensor | None, wanted: Tensor | None = None) -> None:
        """Fills in the adapters of the tokens of a step, which is about to run.

        Args:
            tokens: [num_tokens] int64, on the device; -1 for a token without. None: no token has one. Recorded steps
                read the values again.
            wanted: [num_wanted] int64; indices of the tokens that the last layers see, if they do not see all.
        """
        self.is_active = tokens is not None
        self._step = tokens
        self._wanted_of_step = None if tokens is None or wanted is None else tokens[wanted]
        self.leave_part()

    def enter_part(self, first: int, count: int) -> None:
        """Notes that the next layer sees `count` consecutive tokens of the step, from the index `first` on."""
        if self._step is not None:
            self._tokens, self._wanted = self._step[first : first + count], None

    def enter_rows(self, adapters: Sequence[int]) -> None:
        """Notes that the next layers see rows with these adapters, or -1, instead of tokens of the step."""
        self._tokens = torch.tensor(adapters, dtype=self.index_dtype, device=self._device)
        self._wanted, self.is_active = None, any(each >= 0 for each in adapters)

    def leave_part(self) -> None:
        """Notes that layers see all tokens of the step again, or the wanted ones."""
        self._tokens, self._wanted = self._step, self._wanted_of_step

    def sees(self, num_rows: int) -> bool:
        """Returns True if an input of `num_rows` may be that of all tokens of the step, or of the part of it."""
        return self._tokens is not None and num_rows == len(self._tokens)

    def tokens(self, num_rows: int) -> Tensor:
        """Returns the adapters of the tokens that a layer with an input of `num_rows` sees."""
        assert self._tokens is not None, "see is_active"
        if num_rows == len(self._tokens):
            return self._tokens
        is_wanted = self._wanted is not None and num_rows == len(self._wanted)
        assert is_wanted, f"a layer with adapters sees {num_rows} rows, which are not the step's tokens"
        assert self._wanted is not None
        return self._wanted

    def _added(
        self, bases: Sequence[BaseLayer], in_shards: Sequence[Shard], sizes: Sequence[int], *, has_bias: bool
    ) -> LayerAdapters | None:
        if not self.takes(*(base.part.name for base in bases)):
            return None
        layer = LayerAdapters(self, bases, in_shards, sizes, has_bias=has_bias)
        self.layers.append(layer)
        return layer

    @property
    def _operations(self) -> list[tuple[bool, bool, bool]]:
        """What each layer does in a step with adapters."""
        return [(layer.is_used, layer.has_factors, layer.scales_inputs) for layer in self.layers]


@contextlib.contextmanager
def with_rows_of(place: Adapters | None, adapters: Sequence[int]) -> Iterator[None]:
    """Lets layers run rows of requests, with an adapter each or -1, instead of tokens, while the context lasts."""
    if place is None:
        yield
        return
    is_active = place.is_active
    place.enter_rows(adapters)
    try:
        yield
    finally:
        place.leave_part()
        place.is_active = is_active


@contextlib.contextmanager
def without_tokens(place: Adapters | None) -> Iterator[None]:
    """Lets layers run other rows than the tokens of the step, without adapters, while the context lasts."""
    if place is None:
        yield
        return
    is_active, place.is_active = place.is_active, False
    try:
        yield
    finally:
        place.is_active = is_active


def _ends_with(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _in_float(weight: AdapterWeight) -> AdapterWeight:
    return AdapterWeight(*(None if each is None else each.float() for each in weight))  # type: ignore[arg-type]


def _row_factors(base: BaseLayer, weight: AdapterWeight) -> Tensor:
    """Returns the factors [out] that make the rows of the changed weight as long as the adapter says."""
    assert weight.magnitude is not None
    changed = base.read_weight().to("cpu", torch.float32).addmm_(weight.b, weight.a)
    return weight.magnitude / changed.norm(dim=1)


def _shift(base: BaseLayer, weight: AdapterWeight, factor: Tensor | None) -> Tensor | None:
    """Returns what [out] is added after the factor, so that the layer's bias is the adapter's."""
    shift = weight.added_bias
    if weight.bias is None and factor is None:
        return shift
    own = base.read_bias()
    own = torch.zeros(len(weight.b)) if own is None else own.to("cpu", torch.float32)
    changed = own if weight.bias is None else weight.bias
    bias = changed - own * (1 if factor is None else factor)
    return bias if shift is None else bias + shift
