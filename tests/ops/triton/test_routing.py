"""The kernels that route tokens to experts, against plain torch."""

import pytest
import torch

from quire.ops.eager.routing import route as expected_route
from quire.ops.routing import ExpertRouter, Routing
from quire.ops.triton import routing
from tests.ops.test_experts import ROUTINGS
from tests.ops.triton.conftest import DEVICE

DTYPES = [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]


def make_router(
    form: Routing, weight: torch.dtype, hidden: int, num_experts: int = 12, *, is_full: bool
) -> ExpertRouter:
    torch.manual_seed(0)
    bias, correction, shares = torch.randn(num_experts), torch.randn(num_experts), torch.rand(num_experts)
    correction = None if form.score == "sparse_mixer" else correction.to(DEVICE)
    parts = (bias.to(DEVICE, weight), correction, shares.to(DEVICE)) if is_full else (None, None, None)
    return ExpertRouter(form, (torch.randn(num_experts, hidden) / hidden**0.5).to(DEVICE, weight), *parts)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_routes(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x_dtype, weight_dtype = dtypes
    router = make_router(ROUTINGS[name], weight_dtype, 301, is_full=weight_dtype == torch.float32)
    x = torch.randn(3, 301).to(DEVICE, x_dtype)
    assert routing.covers(x, router)
    ids, weights = routing.route(x, router)
    expected_ids, expected_weights = expected_route(x, router)
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("groups", "num_experts"), [(1, 72), (8, 160)])
def test_a_token_is_routed_alike_in_any_company(groups: int, num_experts: int) -> None:
    form = Routing(6, "sigmoid", renormalize=True, num_groups=groups, top_groups=min(groups, 3), group_best=2)
    router = make_router(form, torch.float32, 320, num_experts, is_full=True)
    x = torch.randn(67, 320).to(DEVICE, torch.bfloat16)
    parts = routing.logits_in_parts(x, router.weight)
    for token in (0, 66):
        assert torch.equal(routing.logits_in_parts(x[token : token + 1], router.weight)[:, 0], parts[:, token])
    x = x[:3]
    ids, weights = routing.route(x, router)
    expected_ids, expected_weights = expected_route(x, router)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4)
    for token in (0, 2):
        alone = routing.route(x[token : token + 1], router)
        assert alone[0].tolist() == ids[token : token + 1].tolist()
        assert torch.equal(alone[1], weights[token : token + 1])


def test_equal_and_undefined_experts_are_chosen_once_each() -> None:
    weight = torch.zeros(5, 32, dtype=torch.bfloat16, device=DEVICE)
    ids, weights = routing.route(weight[:1] + 1, ExpertRouter(Routing(5), weight))
    assert ids.tolist() == [[0, 1, 2, 3, 4]]
    assert weights.tolist() == [[pytest.approx(0.2)] * 5]
    weight[3] = float("nan")
    ids, _ = routing.route(weight[:1] + 1, ExpertRouter(Routing(5, "sigmoid"), weight))
    assert ids.tolist() == [[3, 0, 1, 2, 4]]


def test_no_token_has_no_experts() -> None:
    router = make_router(Routing(2), torch.bfloat16, 32, is_full=False)
    ids, weights = routing.route(torch.empty(0, 32, dtype=torch.bfloat16, device=DEVICE), router)
    assert ids.shape == weights.shape == (0, 2)
