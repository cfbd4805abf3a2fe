"""Bits rest on no BLAS: tokens, hidden states and K/V are the same under products whose order follows a row's
place, and so are those of Triton's interpreter."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from executor_runs import config_of, run_on, session_of  # noqa: E402
from products import ScrambledProducts, in_order, scrambled  # noqa: E402

from executor.kernels.exact import exact_mixture, exact_product  # noqa: E402

POLICIES = ("atomic", "split", "mixed", "wcpb")


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_a_scrambled_product_is_right_and_gives_a_row_other_bits_at_another_place() -> None:
    row, b = randn(1, 64), randn(64, 8, seed=1)
    found = scrambled(row.expand(16, 64).contiguous(), b)
    torch.testing.assert_close(found, (row.double() @ b.double()).float().expand(16, 8))
    assert len({tuple(values) for values in found.tolist()}) > 8


@pytest.mark.parametrize("terms", [1, 16, 64, 176, 5632])
def test_exact_products_do_not_depend_on_place_order_or_neighbours(terms: int) -> None:
    a, b = randn(40, terms) * 10.0 ** randn(40, 1, seed=2), randn(24, terms, seed=1)
    found = exact_product(a, b)
    largest = a.abs().amax(1)[:, None] * b.abs().amax(1) * terms
    assert ((found - a.double() @ b.double().T).abs() <= largest * 2.0**-19).all()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    with ScrambledProducts() as products:
        assert torch.equal(exact_product(a, b), found)
        assert torch.equal(exact_product(a[order], b), found[order])
        assert torch.equal(exact_product(a[5:6], b[3:4]), found[5:6, 3:4])
    assert products.count == 3


def test_what_has_no_weight_changes_no_mixture() -> None:
    weights, values = randn(16, 64).exp(), randn(64, 16, seed=1)
    weights[:, 40:] = 0
    with ScrambledProducts():
        found = exact_mixture(weights, values)
        torch.testing.assert_close(found, weights.double() @ values.double(), rtol=1e-5, atol=1e-4)
        values[40:] *= 1e6
        assert torch.equal(exact_mixture(weights, values), found)


def test_products_in_order_do_not_depend_on_the_height_of_a_tile() -> None:
    a, b = np.asarray(randn(64, 64)), np.asarray(randn(64, 16, seed=1))
    whole = in_order(a, b)
    np.testing.assert_allclose(whole, a.astype(float) @ b, rtol=1e-4, atol=1e-5)
    for start, end in ((0, 16), (3, 4), (30, 62)):
        assert np.array_equal(in_order(a[start:end].copy(), b), whole[start:end])


def test_tokens_hidden_states_and_kv_of_all_policies_are_the_same_under_a_bad_blas(tmp_path: Path) -> None:
    """And the same as under this machine's own: the products are exact."""
    configs = [
        config_of(f"policy={policy}", f"scheduler.prefill_chunk_size={chunk}")
        for policy, chunk in zip(POLICIES, (16, 32, 64, 16), strict=True)
    ]
    session = session_of(*configs)
    expected = run_on(session, tmp_path / "own", session.runs[0])
    with ScrambledProducts() as products:
        for policy, run in zip(POLICIES, session.runs, strict=True):
            done = run_on(session, tmp_path / policy, run)
            assert done.against(expected).is_identical, policy
    assert products.count > 1000
