"""Running a packed model: weights decoded once, rebuilt in every forward, or never built at all."""
