"""Handwritten digits, read pixel by pixel."""
