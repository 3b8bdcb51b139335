"""training/evaluation."""
