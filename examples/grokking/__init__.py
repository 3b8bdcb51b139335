"""Modular addition: a model that memorised its examples long ago begins to generalise."""
