"""What compressing would come to: sizes, seconds and memory, from a sample of every tensor."""

from factorpack.preview.estimate import Preview, TensorPlan, plan

__all__ = ["Preview", "TensorPlan", "plan"]
