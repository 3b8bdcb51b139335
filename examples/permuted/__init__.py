"""Handwritten digits as 784 pixels in an order that has nothing to do with the image."""
