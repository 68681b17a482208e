"""Copies of tokens on their way to experts and back: gradients against finite differences, and against autograd's
own.
"""

import pytest

torch = pytest.importorskip("torch")


def test_a_weighted_sum_of_copies_has_the_gradients_that_autograd_finds():
    from executor.model.permute import weighted_sum

    weights = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    copies = torch.rand(5, 3, 4, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(weighted_sum, (weights, copies))
    plain = (weights[..., None] * copies).sum(1)
    assert torch.allclose(weighted_sum(weights, copies), plain)
