"""Least-squares factors: the SVD start of Algorithm 1, and the best latent for a given codebook."""

from __future__ import annotations

import torch
from torch import Tensor


def principal_basis(matrix: Tensor, rank: int) -> Tensor:
    """The first `rank` left singular vectors of (d, n): (d, rank), orthonormal.

    Taken from the d x d Gram matrix in float64, which is far cheaper than an SVD where n >> d. Each
    vector's largest entry is made positive, so that the result does not depend on the eigensolver.
    """
    wide = matrix.double()
    _, vectors = torch.linalg.eigh(wide @ wide.T)  # ascending
    basis = vectors.flip(1)[:, :rank]
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    signed: Tensor = basis * torch.where(largest < 0, -1.0, 1.0)
    return signed.to(matrix.dtype)


def best_latent(codebook: Tensor, matrix: Tensor) -> Tensor:
    """argmin_Z ||W - C Z||_F for (d, k) and (d, n): (k, n); the least-norm one if C is rank deficient."""
    wide = codebook.double()
    projector: Tensor = torch.linalg.pinv(wide.T @ wide, rtol=1e-10, hermitian=True) @ wide.T  # (k, d)
    return projector.to(matrix.dtype) @ matrix


def truncated_svd(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (m, rank) and (rank, n) whose product is closest to (m, n); each gets half of every singular value."""
    wide = matrix.double()
    if wide.shape[0] > wide.shape[1]:
        left, right = truncated_svd(wide.T, rank)
        return right.T.to(matrix.dtype), left.T.to(matrix.dtype)
    basis = principal_basis(wide, rank)
    rest = basis.T @ wide
    half = rest.norm(dim=1).sqrt()
    return (basis * half).to(matrix.dtype), (rest / torch.where(half > 0, half, 1.0)[:, None]).to(
        matrix.dtype
    )
