"""The ground floor: what every other room uses, and what itself imports none of them."""
