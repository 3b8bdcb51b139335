"""training/checkpoint."""
