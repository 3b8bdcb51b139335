"""training/config."""
