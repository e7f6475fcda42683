"""Fine-tuning: training the packed form itself, end to end."""
