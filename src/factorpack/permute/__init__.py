"""Channels put in an order whose tiles are easier to quantize; the model computes what it did."""

from factorpack.permute.groups import Group, Place, find_groups
from factorpack.permute.model import Permuted, permute_model, reorder

__all__ = ["Group", "Permuted", "Place", "find_groups", "permute_model", "reorder"]
