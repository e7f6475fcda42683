"""Meeting a size: what is known of a model, curves, the loop that meets a budget, and its preview."""
