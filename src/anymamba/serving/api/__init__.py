"""serving/api."""
