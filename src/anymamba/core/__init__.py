"""The ground floor: every other room uses it, and it imports none of them."""
