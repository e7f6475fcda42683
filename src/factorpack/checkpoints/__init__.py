"""Files of weights as others write them: what is in one, read without running any of it."""
