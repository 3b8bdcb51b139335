"""What everyone stands on: files, trees of tensors, devices, signals, memory."""
