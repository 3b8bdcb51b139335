"""training/metrics."""
