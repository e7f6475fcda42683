"""What calibration data show of a model: its inputs, and what its layers see, segment by segment."""
