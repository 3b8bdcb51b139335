"""training/optim."""
