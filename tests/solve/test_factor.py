"""Least-squares factors, against torch's SVD and the normal equations in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from factorpack.solve.factor import best_latent, principal_basis, truncated_svd
from tests.helpers import assert_close, seeded, tolerance

SHAPES = [(8, 8), (8, 40), (16, 300), (12, 5), (1, 7), (6, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_basis_spans_the_first_left_singular_vectors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = seeded(*shape, dtype=dtype)
    left, values, _ = torch.linalg.svd(matrix.double(), full_matrices=True)
    energy = torch.cat([values.square(), torch.zeros(shape[0] + 1 - len(values))])
    for rank in range(1, min(shape) + 1):
        basis = principal_basis(matrix, rank)
        assert (basis.dtype, basis.shape) == (dtype, (shape[0], rank))
        error = (basis @ basis.T - left[:, :rank] @ left[:, :rank].T).norm()
        # Davis-Kahan: subspaces turn by the perturbation over the gap of the eigenvalues.
        assert error <= tolerance(dtype) * energy[0] / (energy[rank - 1] - energy[rank])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_basis_is_orthonormal_even_beyond_the_matrixs_rank(shape: tuple[int, int]) -> None:
    basis = principal_basis(seeded(*shape, dtype=torch.float64), shape[0])
    assert_close(basis.T @ basis, torch.eye(shape[0], dtype=torch.float64))


def test_each_vector_is_the_singular_vector_with_its_largest_entry_positive() -> None:
    matrix = seeded(10, 60, dtype=torch.float64)
    left, _, _ = torch.linalg.svd(matrix, full_matrices=False)
    largest = left.gather(0, left.abs().argmax(0, keepdim=True))
    assert_close(principal_basis(matrix, 10), left * largest.sign())
    assert torch.equal(principal_basis(-matrix, 10), principal_basis(matrix, 10))


@pytest.mark.parametrize("rank", [1, 4, 9, 16])
def test_projecting_loses_exactly_the_discarded_energy(rank: int) -> None:
    """Eckart-Young: the squared singular values that were left out."""
    matrix = seeded(16, 50, dtype=torch.float64)
    basis = principal_basis(matrix, rank)
    lost = (matrix - basis @ (basis.T @ matrix)).square().sum()
    expected = torch.linalg.svdvals(matrix)[rank:].square().sum()
    assert abs(lost - expected) <= tolerance(torch.float64) * matrix.square().sum()


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_the_basis_does_not_depend_on_the_unit(size: float) -> None:
    matrix = seeded(8, 100)
    assert_close(principal_basis(matrix * size, 3), principal_basis(matrix, 3))


def test_a_zero_matrix_still_has_a_basis() -> None:
    basis = principal_basis(torch.zeros(6, 20), 2)
    assert_close(basis.T @ basis, torch.eye(2))


def rank_deficient(rows: int, rank: int, columns: int) -> Tensor:
    return seeded(rows, rank, dtype=torch.float64) @ seeded(rank, columns, dtype=torch.float64, seed=1)


@pytest.mark.parametrize(
    "codebook",
    [
        seeded(12, 5, dtype=torch.float64),
        seeded(12, 12, dtype=torch.float64),
        rank_deficient(12, 3, 7),
        torch.cat([seeded(12, 2, dtype=torch.float64), torch.zeros(12, 3, dtype=torch.float64)], 1),
    ],
    ids=["tall", "square", "deficient", "dead columns"],
)
class TestBestLatent:
    matrix = seeded(12, 40, dtype=torch.float64, seed=2)

    def test_normal_equations(self, codebook: Tensor) -> None:
        latent = best_latent(codebook, self.matrix)
        assert latent.shape == (codebook.shape[1], 40)
        residual = codebook.T @ (self.matrix - codebook @ latent)
        # The pseudo-inverse of the Gram matrix squares the codebook's condition number.
        allowed = tolerance(torch.float64) * condition(codebook) ** 2 * (codebook.T @ self.matrix).abs().max()
        assert residual.abs().max() <= allowed

    def test_equals_the_pseudo_inverse(self, codebook: Tensor) -> None:
        """So it is the least-norm solution where there are many."""
        expected = torch.linalg.pinv(codebook) @ self.matrix
        allowed = tolerance(torch.float64) * condition(codebook) ** 2 * expected.abs().max()
        assert (best_latent(codebook, self.matrix) - expected).abs().max() <= allowed

    def test_no_step_away_from_it_helps(self, codebook: Tensor) -> None:
        latent = best_latent(codebook, self.matrix)
        best = (self.matrix - codebook @ latent).square().sum()
        for seed in range(10):
            step = seeded(*latent.shape, dtype=torch.float64, seed=seed) * 1e-3
            moved = (self.matrix - codebook @ (latent + step)).square().sum()
            assert moved >= best * (1 - tolerance(torch.float64))


def condition(codebook: Tensor) -> float:
    """Largest singular value over the smallest one that is not zero."""
    values = torch.linalg.svdvals(codebook)
    return float(values[0] / values[values > values[0] * 1e-10][-1])


def test_an_orthonormal_codebook_needs_only_its_transpose() -> None:
    matrix = seeded(12, 40, dtype=torch.float64)
    basis = principal_basis(matrix, 5)
    assert_close(best_latent(basis, matrix), basis.T @ matrix)


def test_fp32_in_fp32_out() -> None:
    codebook, matrix = seeded(12, 5), seeded(12, 40, seed=1)
    latent = best_latent(codebook, matrix)
    assert latent.dtype == torch.float32
    assert_close(latent, best_latent(codebook.double(), matrix.double()))


def test_a_codebook_of_zeros_gets_zeros() -> None:
    assert best_latent(torch.zeros(6, 2), seeded(6, 9)).eq(0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_truncation_is_the_svd_s_with_singular_values_halved_between_both(
    shape: tuple[int, int], scale: float
) -> None:
    matrix = scale * seeded(*shape, dtype=torch.float64)
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    for rank in range(1, min(shape) + 1):
        left, right = truncated_svd(matrix, rank)
        assert (left.shape, right.shape) == ((shape[0], rank), (rank, shape[1]))
        # The Gram matrix squares the gaps between singular values, by which its eigenvectors turn.
        assert_close(left @ right, u[:, :rank] * values[:rank] @ v[:rank], torch.float32)
        assert_close(left.norm(dim=0), values[:rank].sqrt())
        assert_close(right.norm(dim=1), values[:rank].sqrt())


def test_truncated_zeros_are_zeros() -> None:
    left, right = truncated_svd(torch.zeros(4, 6), 2)
    assert not (left @ right).any()
    assert right.isfinite().all()
