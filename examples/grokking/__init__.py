"""Modular addition: a model that memorized its examples long ago begins to generalize."""
