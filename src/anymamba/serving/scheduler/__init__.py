"""serving/scheduler."""
