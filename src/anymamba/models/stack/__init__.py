"""models/stack."""
