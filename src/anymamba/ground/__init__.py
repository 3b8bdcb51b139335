"""The ground floor: what every room stands on, and what stands on nothing of ours."""
