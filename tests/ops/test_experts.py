"""Routing and experts against a loop over tokens in float64, and their independence of the batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activations import Activation
from quire.ops.backend import Backend
from quire.ops.cpu.native import NativeBackend
from quire.ops.eager.backend import EagerBackend
from quire.ops.eager.experts import GroupedExperts
from quire.ops.eager.linear import PlainLinear
from quire.ops.experts import ExpertCall, ExpertWeights, LowRankExperts
from quire.ops.linear import LowRankWeights
from quire.ops.quantized import QuantizedWeight, dequantize
from quire.ops.routing import ExpertRouter, Routing
from tests.executor.pretend_device import PretendDevice

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""What a result may differ by, relative to the largest and to 1."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


ROUTINGS = {
    "softmax": Routing(3),
    "softmax-renormalized": Routing(3, renormalize=True, scale=2.5),
    "sigmoid": Routing(2, "sigmoid"),
    "best-groups-by-their-best": Routing(2, num_groups=4, top_groups=2, scale=16.0),
    "best-groups-by-two": Routing(4, "sigmoid", renormalize=True, num_groups=3, top_groups=2, group_best=2),
    "floor": Routing(2, "sigmoid", renormalize=True, floor=5.0),
    "all-experts": Routing(12, renormalize=True),
    "near-experts": Routing(3, "sparse_mixer", distance=0.6),
    "root-of-softplus": Routing(2, "sqrt_softplus", renormalize=True, scale=1.5),
}


def expected_routes(x: Tensor, router: ExpertRouter) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and weights of each token, one by one."""
    routing = router.routing
    all_ids, all_weights = [], []
    for row in x.double():
        logits = router.weight.double() @ row + (0 if router.bias is None else router.bias.double())
        scores = {
            "softmax": logits.softmax(0), "sigmoid": logits.sigmoid(), "sparse_mixer": logits,
            "sqrt_softplus": torch.nn.functional.softplus(logits).sqrt(),
        }[routing.score]  # fmt: skip
        choice = scores + (0 if router.correction is None else router.correction.double())
        size = len(choice) // routing.num_groups
        groups = [choice[first : first + size].tolist() for first in range(0, len(choice), size)]
        ranked = sorted(range(len(groups)), key=lambda i: -sum(sorted(groups[i])[-routing.group_best :]))
        allowed = [i for i in range(len(choice)) if i // size in ranked[: routing.top_groups]]
        ids = sorted(allowed, key=lambda i: -choice[i].item())[: routing.top_k]
        weights = [scores[i].item() for i in ids]
        if routing.score == "sparse_mixer":
            weights = [near_share(logits, ids[:place], ids[place], routing.distance) for place in range(len(ids))]
        if routing.renormalize:
            total = max(sum(weights), routing.floor)
            weights = [weight / total for weight in weights]
        all_ids.append(ids)
        shares = torch.ones(len(choice)) if router.shares is None else router.shares
        all_weights.append([weight * routing.scale * shares[i].item() for weight, i in zip(weights, ids, strict=True)])
    return all_ids, all_weights


def near_share(logits: Tensor, taken: list[int], chosen: int, distance: float) -> float:
    most = logits[chosen]
    near = [
        i for i, logit in enumerate(logits) if i not in taken and (most - logit) / max(abs(logit), most) <= distance
    ]
    return (1 / (logits[near] - most).exp().sum()).item()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routes(ops: Backend, name: str, is_corrected: bool, dtype: torch.dtype) -> None:
    correction = torch.randn(12) if is_corrected and name != "near-experts" else None
    shares = torch.rand(12) if is_corrected else None
    weight_dtype = torch.float32 if is_corrected else dtype  # a router may be kept in float32
    bias = torch.randn(12).to(weight_dtype) if name == "softmax" else None
    router = ExpertRouter(ROUTINGS[name], (torch.randn(12, 37) / 6).to(weight_dtype), bias, correction, shares)
    x = torch.randn(33, 37).to(dtype)
    for num_tokens in (1, 5, 33):
        ids, weights = ops.route(x[:num_tokens], router)
        expected_ids, expected_weights = expected_routes(x[:num_tokens], router)
        assert ids.dtype == torch.int64
        assert ids.tolist() == expected_ids
        torch.testing.assert_close(weights, torch.tensor(expected_weights), atol=1e-5, rtol=1e-4)


def make_experts(
    num_experts: int,
    hidden_size: int,
    size: int,
    dtype: torch.dtype,
    *,
    has_bias: bool = False,
    is_int8: bool = False,
    is_gated: bool = True,
) -> list[ExpertWeights]:
    outputs = 2 * size if is_gated else size

    def weight(out: int, inputs: int) -> Tensor | QuantizedWeight:
        if is_int8:
            values = torch.randint(-127, 128, (out, inputs), dtype=torch.int8)
            return QuantizedWeight(values, (torch.rand(out, 1) + 0.5) / 64 / inputs**0.5)
        return (torch.randn(out, inputs) / inputs**0.5).to(dtype)

    def bias(out: int) -> Tensor | None:
        return torch.randn(out).to(dtype) if has_bias else None

    return [
        ExpertWeights(weight(outputs, hidden_size), weight(hidden_size, size), bias(outputs), bias(hidden_size))
        for _ in range(num_experts)
    ]


def dequantized(weight: Tensor | QuantizedWeight) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return weight.codes.double() * weight.scales.double()
    return weight.double()


def expected_output(
    ops: Backend, x: Tensor, experts: list[ExpertWeights], ids: Tensor, weights: Tensor, activation: Activation
) -> Tensor:
    """The sum over each token's experts, one after another."""
    rows = []
    for row, its_ids, its_weights in zip(x.double(), ids.tolist(), weights.tolist(), strict=True):
        total = torch.zeros_like(row)
        for index, share in zip(its_ids, its_weights, strict=True):
            gate_up, down, gate_up_bias, down_bias, _ = experts[index]
            inner = dequantized(gate_up) @ row + (0 if gate_up_bias is None else gate_up_bias.double())
            if not experts[index].is_gated:
                inner = inner.relu().square() if activation == "relu2" else inner * inner.sigmoid()
                total += share * (dequantized(down) @ inner + (0 if down_bias is None else down_bias.double()))
                continue
            gate, up = inner.chunk(2)
            if activation == "clamped_swiglu":
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                inner = gate * (1.702 * gate).sigmoid() * (up + 1)
            elif activation == "clamped_silu":
                inner = torch.nn.functional.silu(gate.clamp(max=10)) * up.clamp(-10, 10)
            elif activation == "silu":
                inner = gate * gate.sigmoid() * up
            else:
                inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            total += share * (dequantized(down) @ inner + (0 if down_bias is None else down_bias.double()))
        rows.append(total)
    return torch.stack(rows)


def choose(num_tokens: int, num_experts: int, top_k: int) -> tuple[Tensor, Tensor]:
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, top_k) + 0.1


SHAPES = [(1, 1, 1, 1), (4, 7, 5, 2), (8, 64, 48, 3), (5, 130, 33, 5), (16, 96, 24, 4)]
"""(experts, hidden, size, top_k)."""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
def test_the_result_is_the_weighted_sum_of_the_chosen_experts(
    ops: Backend, shape: tuple[int, int, int, int], is_int8: bool, dtype: torch.dtype
) -> None:
    num_experts, hidden_size, size, top_k = shape
    experts = make_experts(num_experts, hidden_size, size, dtype, has_bias=size % 2 == 1, is_int8=is_int8)
    packed = ops.pack_experts(iter(experts), num_experts)
    for num_tokens in (1, 2, 3, 7, 40, 130):
        x = torch.randn(num_tokens, hidden_size).to(dtype)
        ids, weights = choose(num_tokens, num_experts, top_k)
        got = ops.experts(packed, ExpertCall(x, ids, weights))
        assert got.dtype == dtype
        expected = expected_output(ops, x, experts, ids, weights, "silu")
        largest = expected.abs().max().item() + 1  # terms that cancel each other are rounded, too
        torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype] * largest, rtol=0)


@pytest.mark.parametrize("has_order", [False, True])
def test_quantized_experts_of_an_accelerator_read_nothing_from_it(
    has_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.ops.eager.experts.PART", 2 * 96 * 37)  # two experts of five at a time
    experts = make_experts(5, 37, 48, torch.float32, is_int8=True)
    if has_order:
        experts = [
            each._replace(gate_up=each.gate_up._replace(input_order=torch.randperm(37)))
            for each in experts
            if isinstance(each.gate_up, QuantizedWeight)
        ]
    plain = [ExpertWeights(dequantize(each.gate_up), dequantize(each.down)) for each in experts]  # type: ignore[arg-type]
    ops, x, (ids, weights) = EagerBackend(PlainLinear()), torch.randn(9, 37), choose(9, 5, 2)
    ids[0], ids[1:, 0] = -1, 3
    expected = ops.experts(ops.pack_experts(plain, 5), ExpertCall(x, ids, weights))
    with PretendDevice() as device:
        there = [
            ExpertWeights(*(QuantizedWeight(*_put(each)) for each in expert[:2] if isinstance(each, QuantizedWeight)))
            for expert in experts
        ]
        packed = ops.pack_experts(there, 5)
        x, ids, weights = (each.to("cuda") for each in (x, ids, weights))
        with device.without_reads():
            got = ops.experts(packed, ExpertCall(x, ids, weights))
    torch.testing.assert_close(got.as_subclass(Tensor), expected)


def test_plain_torch_on_a_host_dequantizes_only_experts_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.eager.experts.PART", 2 * 96 * 37)  # two experts of six at a time
    experts = make_experts(6, 37, 48, torch.float32, is_int8=True)
    ops, x = EagerBackend(PlainLinear()), torch.randn(3, 37)
    packed, ids, weights = ops.pack_experts(experts, 6), torch.tensor([[5], [0], [5]]), torch.ones(3, 1)
    shapes: list[torch.Size] = []

    def counted(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        shapes.append(weight.shape)
        return dequantize(weight, dtype)

    monkeypatch.setattr("quire.ops.eager.experts.dequantize", counted)
    got = ops.experts(packed, ExpertCall(x, ids, weights))
    assert len(shapes) == 2 * 4, "both products of the experts 0, 1, 4 and 5"
    torch.testing.assert_close(
        got.double(), expected_output(ops, x, experts, ids, weights, "silu"), atol=1e-4, rtol=1e-4
    )


def _put(weight: QuantizedWeight) -> list[Tensor | None]:
    parts = (weight.codes, weight.scales, weight.table, weight.offsets, weight.input_order)
    return [None if part is None else part.to("cuda") for part in parts]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu", "clamped_silu"])
def test_activations_and_biases(ops: Backend, activation: Activation, has_bias: bool) -> None:
    experts = make_experts(6, 32, 40, torch.float32, has_bias=has_bias)
    packed = ops.pack_experts(experts, 6)
    x = torch.randn(9, 32) * 6  # some gates and ups pass the limits
    ids, weights = choose(9, 6, 2)
    got = ops.experts(packed, ExpertCall(x, ids, weights, activation))
    expected = expected_output(ops, x, experts, ids, weights, activation)
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("size", "is_int8"), [(5, False), (24, True), (33, False), (70, True)])
def test_experts_without_gates(ops: Backend, size: int, is_int8: bool, dtype: torch.dtype) -> None:
    experts = make_experts(5, 37, size, dtype, has_bias=size % 2 == 1, is_int8=is_int8, is_gated=False)
    packed = ops.pack_experts(iter(experts), 5)
    for activation in ("relu2", "silu"):
        for num_tokens in (1, 3, 40):
            x = torch.randn(num_tokens, 37).to(dtype)
            ids, weights = choose(num_tokens, 5, 2)
            expected = expected_output(ops, x, experts, ids, weights, activation)
            got = ops.experts(packed, ExpertCall(x, ids, weights, activation))
            atol = TOLERANCE[dtype] * (expected.abs().max().item() + 1)
            torch.testing.assert_close(got.double(), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("is_gated", [True, False])
def test_weights_may_multiply_the_inputs(ops: Backend, is_gated: bool) -> None:
    experts = make_experts(5, 32, 24, torch.float32, has_bias=True, is_gated=is_gated)
    packed = ops.pack_experts(experts, 5)
    x, (ids, weights) = torch.randn(9, 32), choose(9, 5, 2)
    expected = torch.zeros(9, 32, dtype=torch.float64)
    for place in range(2):
        scaled, its_ids = x * weights[:, place : place + 1], ids[:, place : place + 1]
        expected += expected_output(ops, scaled, experts, its_ids, torch.ones(9, 1), "silu")
    got = ops.experts(packed, ExpertCall(x, ids, weights, weighs_inputs=True))
    torch.testing.assert_close(got.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_experts_that_are_elsewhere_add_nothing(ops: Backend, is_int8: bool, dtype: torch.dtype) -> None:
    experts = make_experts(5, 37, 24, dtype, has_bias=True, is_int8=is_int8)
    packed = ops.pack_experts(experts, 5)
    x, (ids, weights) = torch.randn(11, 37).to(dtype), choose(11, 5, 3)
    ids[0], ids[1:4, 0], ids[5, 1:] = -1, -1, -1
    expected = expected_output(ops, x, experts, ids.clamp(min=0), weights.masked_fill(ids < 0, 0), "silu")
    got = ops.experts(packed, ExpertCall(x, ids, weights))
    torch.testing.assert_close(
        got.double(), expected, atol=TOLERANCE[dtype] * (1 + expected.abs().max().item()), rtol=0
    )
    assert not got[0].any()
    assert not ops.experts(packed, ExpertCall(x, torch.full_like(ids, -1), weights)).any()


@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
def test_an_expert_may_take_the_place_of_another(ops: Backend, is_int8: bool) -> None:
    packed = ops.pack_experts(make_experts(4, 37, 24, torch.bfloat16, has_bias=True, is_int8=is_int8), 4)
    x, (ids, weights) = torch.randn(9, 37).bfloat16(), choose(9, 3, 2)
    expected = ops.experts(packed, ExpertCall(x, torch.where(ids == 1, 3, ids), weights))
    assert not torch.equal(ops.experts(packed, ExpertCall(x, ids, weights)), expected)
    for to, source in zip(ops.expert_tensors(packed, 1), ops.expert_tensors(packed, 3), strict=True):
        to.copy_(source)
    assert torch.equal(ops.experts(packed, ExpertCall(x, ids, weights)), expected)


def test_input_may_be_a_view(ops: Backend) -> None:
    experts = make_experts(4, 16, 24, torch.float32)
    packed = ops.pack_experts(experts, 4)
    x = torch.randn(5, 40)[:, 11:27]
    ids, weights = choose(5, 4, 2)
    got = ops.experts(packed, ExpertCall(x, ids, weights))
    torch.testing.assert_close(got, ops.experts(packed, ExpertCall(x.contiguous(), ids, weights)), atol=1e-6, rtol=1e-6)


def test_a_layer_without_experts_is_refused(ops: Backend) -> None:
    with pytest.raises(ValueError, match="without experts"):
        ops.pack_experts([], 0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_int8", [False, True], ids=["plain", "int8"])
def test_a_token_is_the_same_in_any_batch(own_native: NativeBackend, is_int8: bool, dtype: torch.dtype) -> None:
    """To the bit: as one row of an expert or of a tile, and with one expert for nearly all tokens."""
    packed = own_native.pack_experts(make_experts(6, 70, 45, dtype, is_int8=is_int8), 6)
    router = ExpertRouter(Routing(2, renormalize=True), torch.randn(6, 70) / 8, torch.tensor([9.0, 0, 0, 0, 0, 0]))
    x = torch.randn(230, 70).to(dtype)
    all_ids, all_weights = own_native.route(x, router)
    together = own_native.experts(packed, ExpertCall(x, all_ids, all_weights))
    for rows in (slice(1), slice(2), slice(3), slice(6), slice(7, 12), slice(90), slice(77, 78)):
        ids, weights = own_native.route(x[rows], router)
        assert torch.equal(ids, all_ids[rows])
        assert torch.equal(weights, all_weights[rows])
        assert torch.equal(own_native.experts(packed, ExpertCall(x[rows], ids, weights)), together[rows])


def test_parts_of_a_long_prompt_and_the_number_of_threads_do_not_show(own_native: NativeBackend) -> None:
    """4000 tokens of 3000 numbers take more working memory than the kernel takes at once."""
    packed = own_native.pack_experts(make_experts(3, 3000, 8, torch.float32), 3)
    x = torch.randn(4000, 3000)
    ids, weights = choose(len(x), 3, 2)
    together = own_native.experts(packed, ExpertCall(x, ids, weights))
    torch.set_num_threads(4)
    try:
        assert torch.equal(own_native.experts(packed, ExpertCall(x, ids, weights)), together)
    finally:
        torch.set_num_threads(1)
    last = slice(3990, 4000)
    assert torch.equal(own_native.experts(packed, ExpertCall(x[last], ids[last], weights[last])), together[last])


def test_kernels_round_nothing_but_the_result(own_native: NativeBackend) -> None:
    experts = make_experts(4, 96, 40, torch.bfloat16, has_bias=True)
    x = torch.randn(30, 96).bfloat16()
    ids, weights = choose(30, 4, 3)
    got = own_native.experts(own_native.pack_experts(experts, 4), ExpertCall(x, ids, weights))
    expected = expected_output(own_native, x, experts, ids, weights, "silu")
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-5 * expected.abs().max().item())


def test_a_recording_runs_on_new_inputs(own_native: NativeBackend) -> None:
    packed = own_native.pack_experts(make_experts(8, 64, 48, torch.bfloat16), 8)
    router = ExpertRouter(Routing(3), torch.randn(8, 64))
    x = torch.randn(3, 64).bfloat16()

    def run() -> Tensor:
        return own_native.experts(packed, ExpertCall(x, *own_native.route(x, router)))

    out, recording = own_native.record(run)
    assert recording is not None
    x.copy_(torch.randn(3, 64))
    recording.run()
    assert torch.equal(out, run())


def test_inputs_that_do_not_fit_are_refused(own_native: NativeBackend) -> None:
    packed = own_native.pack_experts(make_experts(4, 16, 8, torch.float32), 4)
    ids, weights = choose(2, 4, 2)
    with pytest.raises(ValueError, match=r"bfloat16 \[2, 16\]; these experts take torch.float32 \[\*, 16\]"):
        own_native.experts(packed, ExpertCall(torch.randn(2, 16).bfloat16(), ids, weights))
    with pytest.raises(ValueError, match=r"\[2, 15\]"):
        own_native.experts(packed, ExpertCall(torch.randn(2, 15), ids, weights))
    for bad in (-2, 4):
        with pytest.raises(ValueError, match="from 0 to 3, or -1"):
            own_native.experts(packed, ExpertCall(torch.randn(2, 16), torch.full((2, 2), bad), weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighs_inputs", [False, True])
def test_adapters_of_experts_are_those_of_merged_weights(ops: Backend, dtype: torch.dtype, weighs_inputs: bool) -> None:
    """Of three adapters, with ranks of 3, 1 and none; tokens without, and another rank's expert, are among them."""
    num_experts, hidden, size, most = 5, 37, 19, 3
    experts = make_experts(num_experts, hidden, size, dtype)
    ranks = torch.tensor([3, 1, 0]).repeat_interleave(num_experts)
    live = (torch.arange(most) < ranks.unsqueeze(1)).to(dtype)

    def low_rank(inputs: int, sizes: tuple[int, ...]) -> LowRankWeights:
        a = torch.randn(len(ranks), len(sizes), most, inputs).to(dtype) / 6 * live[:, None, :, None]
        b = torch.randn(len(ranks), most, sum(sizes)).to(dtype) / 2 * live[:, :, None]
        return LowRankWeights(a.flatten(1, 2), b, sizes, ranks)

    def merged(weight: Tensor, added: LowRankWeights, number: int) -> Tensor:
        parts = zip(added.a[number].chunk(len(added.sizes)), added.b[number].split(added.sizes, dim=1), strict=True)
        return weight.double() + torch.cat([b.double().T @ a.double() for a, b in parts])

    x, (ids, weights) = torch.randn(23, hidden).to(dtype), choose(23, num_experts, 2)
    ids[4, 0] = -1
    adapters = torch.arange(23) % 4 - 1
    gate_up, down = low_rank(hidden, (size, size)), low_rank(size, (hidden,))
    added = LowRankExperts(gate_up, down, adapters)
    packed = ops.pack_experts(iter(experts), num_experts)
    got = ops.experts(packed, ExpertCall(x, ids, weights, "silu", weighs_inputs, added))
    wanted = torch.zeros(23, hidden, dtype=torch.float64)
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if expert < 0:
                continue
            number = int(adapters[token]) * num_experts + expert
            both, last = (
                each.double() if adapters[token] < 0 else merged(each, more, number)
                for each, more in ((experts[expert].gate_up, gate_up), (experts[expert].down, down))
                if isinstance(each, Tensor)
            )
            gate, up = (both @ (x[token].double() * (share if weighs_inputs else 1))).chunk(2)
            wanted[token] += last @ (F.silu(gate) * up) * (1 if weighs_inputs else share)
    largest = wanted.abs().max().item() + 1
    torch.testing.assert_close(got.double(), wanted, atol=TOLERANCE[dtype] * largest, rtol=0)
    alone = ExpertCall(x[5:6], ids[5:6], weights[5:6], "silu", weighs_inputs, added._replace(adapters=adapters[5:6]))
    if not isinstance(packed, GroupedExperts):
        assert torch.equal(ops.experts(packed, alone), got[5:6])
