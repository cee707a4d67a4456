"""Our layers in towers: a dry run on a small image finds those of the class, and ours replace them."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import flash_attention_mask

from quire.core.errors import ModelLoadError
from quire.core.logging import get_logger
from quire.executor.layers.context import ModelContext
from quire.executor.models.transformers.layer_modules import Patches
from quire.executor.models.transformers.probe import Findings, runnable, set_attention
from quire.executor.models.transformers.replacement import LayerReplacement
from quire.executor.models.transformers.splits import Split, choose_splits
from quire.executor.models.transformers.tower_attention import LENGTHS, TowerAttention
from quire.executor.models.transformers.tower_blocks import TowerBlock, read_block
from quire.executor.models.transformers.tower_samples import READER, sample_images
from quire.executor.parallel.groups import ParallelGroup
from quire.executor.weights.quantization.schemes import of_towers

logger = get_logger(__name__)

_VALUES = 4
"""How many times the values of the largest product a tower has at once: queries, keys and values in float32, and what
is rotated of them, beside the residual stream."""

_TOLERANCES = {torch.float32: 1e-4}
_TOLERANCE = 0.1  # for 16-bit dtypes


@dataclass
class TowerFindings(Findings):
    """The results of a dry run of a tower, which keeps no inputs: only which layers share one.

    Attributes:
        most_values: elements of input and output of the largest linear layer.
        cutting: the configurations of modules that tell attention where sequences end.
    """

    most_values: int = 0
    cutting: list[Any] = field(default_factory=list)

    def note(self, linear: nn.Module, x: Tensor, out: Tensor) -> None:
        mark = vars(x).setdefault("quire_mark", torch.empty(0))
        self.inputs.append((linear, mark))
        self.most_values = max(self.most_values, x.numel() + out.numel())

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _: object = None, **arguments: Any
    ) -> tuple[Tensor, None]:
        """Returns values in the form of an attention's result."""
        if arguments.get(LENGTHS) is not None:
            self.cutting.append(module.config)
        heads = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        if query.shape[2] != key.shape[2]:
            heads = heads[:, :, :1].expand(-1, -1, query.shape[2], -1)
        return heads.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class TowerCode:
    """What a dry run found of a class's tower.

    Attributes:
        sample: the image that it read.
        activation_size: values that it computes at once for each row.
        num_deep: layers of the language model that it has features for.
    """

    findings: TowerFindings
    sample: Mapping[str, Tensor]
    activation_size: int
    num_deep: int

    def set_cutting(self, name: str) -> None:
        """Makes the modules that tell where sequences end call the attention that is registered under `name`."""
        for config in self.findings.cutting:
            config._attn_implementation_internal = name


class TowerLayers:
    """The layers and the attention of a class's towers: ours, where a dry run understands the class.

    Attributes:
        attention: the function that towers call.
    """

    def __init__(self, model: PreTrainedModel, backbone: nn.Module, context: ModelContext) -> None:
        self._model = model
        self._backbone = backbone
        self._device = context.device
        self._dtype = context.dtype
        self._code: TowerCode | None = None
        self.attention = TowerAttention(context.ops, context.device)
        self.attention.register(self)

    def replace(self, context: ModelContext, modules: Collection[nn.Module]) -> TowerCode | None:
        """Replaces layers among `modules`, whose weights `context` reads. None, with a line in the log: none are."""
        try:
            self._code = explore_tower(self._model, self._backbone)
        except ModelLoadError as error:
            logger.info("the towers of %s run in the library's layers: %s", type(self._model).__name__, error)
            return None
        TowerReplacement(self._model, context, self._code.findings, modules).run(self.attention)
        return self._code

    def settle(self, modules: Iterable[nn.Module]) -> None:
        """Sets the attention of `modules`: ours, or the library's in classes that compute it themselves.

        Where a class tells ours alone where sequences end, rows of the two are compared.
        """
        kept: list[Any] = [self._model.config, self._model.config.get_text_config()]
        modules = list(modules)
        for module in modules:
            if isinstance(module, PreTrainedModel):
                set_attention(module, self.attention.whole if module._supports_sdpa else "eager")
                kept += [part.config for part in module.modules() if hasattr(part, "config")]
        known = {id(config) for config in kept}
        for module in modules:
            if isinstance(config := getattr(module, "config", None), PretrainedConfig) and id(config) not in known:
                config._attn_implementation_internal = "sdpa"  # of a projector that attends
        code = self._code
        if code is None or not code.findings.cutting or self._device.type == "meta":
            return
        try:
            expected = self._rows(code)
            code.set_cutting(self.attention.cut)
            fault = "its rows are others" if not _is_close(self._rows(code), expected) else ""
        except Exception as error:  # the code of a model may raise anything
            fault = f"{type(error).__name__}: {error}"
        if fault:
            logger.info("the towers of %s cut sequences by masks: %s", type(self._model).__name__, fault)
            code.set_cutting(self.attention.whole)

    @torch.inference_mode()
    def _rows(self, code: TowerCode) -> Tensor:
        """Computes the rows of the sample."""
        arguments = {
            name: value.to(self._device, self._dtype) if value.is_floating_point() else value.to(self._device)
            for name, value in code.sample.items()
        }
        try:
            return _rows_of(getattr(self._backbone, READER)(**arguments, return_dict=True))
        finally:
            self.attention.forget()


def explore_tower(model: PreTrainedModel, backbone: nn.Module) -> TowerCode:
    """Runs the code of a class, without memory for weights, on an image.

    Raises:
        ModelLoadError: no form of images is known that it takes.
    """
    faults = []
    if hasattr(backbone, READER):
        for sample in sample_images(backbone, model.config):
            findings = TowerFindings()
            try:
                with runnable(model, findings, {}, is_flat=False), _cutting(model, findings):
                    pixels = {"pixel_values": sample["pixel_values"].to(model.dtype)}
                    made = getattr(backbone, READER)(**{**sample, **pixels}, return_dict=True)
                num_rows = max(1, len(_rows_of(made)))
            except Exception as error:  # whatever the library raises for arrays of another form
                faults.append(f"{type(error).__name__}: {error}")
                continue
            num_deep = len(getattr(made, "deepstack_features", None) or ())
            return TowerCode(findings, sample, -(-_VALUES * findings.most_values // num_rows), num_deep)
    raise ModelLoadError(f"no small image is known that it takes ({faults[0] if faults else 'it tells no form'})")


@contextlib.contextmanager
def _cutting(model: PreTrainedModel, findings: TowerFindings) -> Iterator[None]:
    """Makes the class call `TowerFindings.attend`, under a name by which it tells where sequences end."""
    name = f"quire-probe-flash-{id(findings)}"
    AttentionInterface.register(name, findings.attend)
    AttentionMaskInterface.register(name, flash_attention_mask)
    set_attention(model, name)
    try:
        yield
    finally:
        set_attention(model, "eager")
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)


def _rows_of(made: Any) -> Tensor:
    """Joins the rows of all images in a result of `READER`, [num_rows, hidden]."""
    features = getattr(made, "pooler_output", made)
    features = made.last_hidden_state if features is None else features
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([_rows_of(each) for each in features])


def _is_close(got: Tensor, expected: Tensor) -> bool:
    """Compares rows that are computed in the same dtype in two ways."""
    difference = float((got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6))
    return difference <= _TOLERANCES.get(got.dtype, _TOLERANCE)


class TowerReplacement:
    """Replaces the layers among `modules` that a dry run reached; `context` reads their weights.

    They are quantized where the checkpoint has them so, and have no adapters.
    """

    def __init__(
        self, model: PreTrainedModel, context: ModelContext, findings: TowerFindings, modules: Collection[nn.Module]
    ) -> None:
        group = context.group if context.divides_towers else ParallelGroup()
        self._model = model
        self._context = replace(context, group=group, adapters=None, scheme=of_towers(context.scheme))
        self._findings = findings
        self._modules = modules
        self._reached = {module for module in modules if module in findings.called}
        self._splits: dict[nn.Module, Split] = {
            module: split
            for module, split in choose_splits(model, findings, self._context, with_plan=False).items()
            if module in self._reached and type(module) is nn.Linear
        }

    def run(self, attention: TowerAttention) -> None:
        """Replaces all layers that have a counterpart; `attention` is that of towers."""
        findings = self._findings
        replaced = self._replace_blocks(attention)
        own = replace(findings, inputs=[each for each in findings.inputs if each[0] not in replaced])
        splits = {module: split for module, split in self._splits.items() if module not in replaced}
        kept = {module for module in self._model.modules() if module not in self._reached}
        LayerReplacement(self._model, self._context, own, splits, kept).replace_layers()
        for name, module in list(self._model.named_modules()):
            if module in self._reached and _cuts_patches(module):
                self._put(name, _patches(self._context, name, module))
        for module in self._modules:
            if isinstance(module, PreTrainedModel) and next(module.parameters(), None) is None:
                number = torch.zeros((), dtype=self._context.dtype)  # classes ask any parameter for their own dtype
                module.register_parameter("number", nn.Parameter(number, requires_grad=False))

    def _replace_blocks(self, attention: TowerAttention) -> set[nn.Module]:
        """Replaces whole modules of attention, and returns their linear layers."""
        names = {module: name for name, module in self._model.named_modules()}
        called: dict[str, list[str]] = {}
        for module, _ in self._findings.inputs:
            parent, _, child = names[module].rpartition(".")
            called.setdefault(parent, []).append(child)
        replaced: set[nn.Module] = set()
        for parent, order in called.items():
            block = self._model.get_submodule(parent)
            layers = {module for module in block.modules() if next(module.parameters(recurse=False), None) is not None}
            form = read_block(block, order) if layers <= self._splits.keys() else None
            if form is not None and form.num_heads % self._context.group.size == 0:
                self._put(parent, TowerBlock(self._context, attention, parent, block, form))
                replaced |= layers
        return replaced

    def _put(self, name: str, part: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        self._model.get_submodule(parent)._modules[child] = part


def _cuts_patches(module: Any) -> bool:
    """Returns True for a convolution of patches that do not overlap."""
    return (
        type(module) in (nn.Conv2d, nn.Conv3d)
        and module.kernel_size == module.stride
        and module.padding in ("valid", (0,) * len(module.kernel_size))
        and set(module.dilation) == {1}
        and module.groups == 1
    )


def _patches(context: ModelContext, name: str, module: Any) -> Patches:
    shape, has_bias = tuple(module.weight.shape), module.bias is not None

    def read() -> tuple[Tensor, Tensor | None]:
        weight = context.read(f"{name}.weight", shape).flatten(1)
        return weight, context.read(f"{name}.bias", shape[:1]) if has_bias else None

    return Patches(context, read, module.kernel_size, module.weight.dtype)
