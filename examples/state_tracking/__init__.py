"""State tracking: parity and modular arithmetic, learned on short sequences and judged on long ones."""
