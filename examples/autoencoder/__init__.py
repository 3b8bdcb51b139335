"""Handwritten digits through a bottleneck of a few numbers."""
