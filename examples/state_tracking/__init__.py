"""State tracking: parity and modular arithmetic, learnt on short sequences and judged on long ones."""
