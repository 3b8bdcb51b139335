"""Serving: an HTTP server whose conversations cost the same memory at any length."""
