"""Plans: which method each tensor gets."""
