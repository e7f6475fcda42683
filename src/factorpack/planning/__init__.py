"""Which method each tensor gets: rules, recipes, and the recipes of model families."""
