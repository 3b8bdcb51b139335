"""The smallest tasks that need a selective decay, a rotation, and rotations that do not commute."""
