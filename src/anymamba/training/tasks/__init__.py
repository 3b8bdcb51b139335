"""training/tasks."""
