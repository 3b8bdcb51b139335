"""Modular addition: a model that has long known its examples by heart begins to understand."""
