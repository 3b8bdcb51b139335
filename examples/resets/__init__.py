"""The smallest tasks that need a selective decay, a rotation, and a rotation that does not commute."""
