"""Reorders channels so that tiles are easier to quantize; the model's outputs stay the same."""

from factorpack.comparison.permute.channel_groups import Group, Place, find_groups
from factorpack.comparison.permute.permuted_model import Permuted, permute_model, reorder

__all__ = ["Group", "Permuted", "Place", "find_groups", "permute_model", "reorder"]
