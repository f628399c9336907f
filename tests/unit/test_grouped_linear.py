"""Grouped matrix products against one product per expert, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_parallel.ops import grouped_linear as module
from lt_parallel.ops.grouped_linear import grouped_linear

counts = st.lists(st.integers(0, 9), min_size=1, max_size=6)
# Both sides of the rule for one call: 4 and 8 float32 are whole 16 bytes, 3 and 5 aren't.
sizes = st.sampled_from([3, 4, 5, 8])


@settings(deadline=None, max_examples=60)
@given(tokens_per_expert=counts, inputs=sizes, outputs=sizes, seed=st.integers(0, 1000))
def test_values_and_gradients(tokens_per_expert: list[int], inputs: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(tokens_per_expert)
    x = torch.randn(tokens, inputs, generator=generator, requires_grad=True)
    weight = torch.randn(len(tokens_per_expert), outputs, inputs, generator=generator, requires_grad=True)
    upstream = torch.randn(outputs, tokens, generator=generator).t()  # not contiguous
    result = grouped_linear(x, weight, tokens_per_expert)
    result.backward(upstream)

    exact_x, exact_weight = (each.detach().double().requires_grad_() for each in (x, weight))
    parts = zip(exact_x.split(tokens_per_expert), exact_weight, strict=True)
    exact = torch.cat([part @ matrix.t() for part, matrix in parts])
    exact.backward(upstream.double())
    for found, wanted in ((result, exact), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert found is not None and wanted is not None
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_an_expert_without_tokens_gets_zeros() -> None:
    weight = torch.ones(3, 4, 4, requires_grad=True)
    grouped_linear(torch.ones(5, 4), weight, [0, 5, 0]).sum().backward()
    assert weight.grad is not None
    assert weight.grad[0].count_nonzero() == weight.grad[2].count_nonzero() == 0
    assert torch.equal(weight.grad[1], torch.full((4, 4), 5.0))


def test_no_token_at_all() -> None:
    x, weight = torch.ones(0, 8, requires_grad=True), torch.ones(2, 4, 8, requires_grad=True)
    result = grouped_linear(x, weight, [0, 0])
    assert result.shape == (0, 4)
    result.sum().backward()
    assert weight.grad is not None and weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_and_expert_by_expert_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(7, 8).to(dtype), torch.randn(3, 16, 8).to(dtype)
    in_one_call = grouped_linear(x, weight, [2, 0, 5])
    monkeypatch.setattr(module, "_GROUPED_MM", None)
    torch.testing.assert_close(in_one_call, grouped_linear(x, weight, [2, 0, 5]))


@pytest.mark.parametrize("tokens_per_expert", [[1, 2], [3, 0, 0], [1, 1, 1, 1]])
def test_counts_that_do_not_fit(tokens_per_expert: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must be 3 counts .* add up to 4 tokens"):
        grouped_linear(torch.ones(4, 8), torch.ones(3, 4, 8), tokens_per_expert)
