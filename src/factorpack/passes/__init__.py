"""Forward passes in parts: where a model can be cut, runs between two cuts, weights read when they run."""
