"""How a tensor can be stored: one object per kind."""
