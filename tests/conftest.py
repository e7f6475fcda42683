"""Property tests run the same examples every time, and no test is slow because the machine is busy."""

from __future__ import annotations

import torch
from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("steady")

# Matrices this small gain nothing from threads, and threads that wait for a busy core spin.
torch.set_num_threads(1)
