"""State tracking: parity and modular arithmetic, learned on short sequences and evaluated on long ones."""
