"""Comparisons and inputs that several tests share."""

import os
import subprocess
import sys

import torch

# Largest difference from the oracle, relative to the oracle's largest entry. Measured over the suite's cases on the
# portable paths: float64 4e-15, float32 2e-6, and one rounding of the output for the half precisions.
FLOOR = {torch.float64: 1e-10, torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

# The same for the logits of whole float32 models, ours and the reference's, against ours in float64. Measured over the
# golden models: at most 7e-6, of Mamba-1.
MODEL_FLOOR = 3e-5


def relative_error(actual, expected, least=0.0):
    """Largest difference relative to the largest entry of `expected` (or `least`); infinite if not finite."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual.detach().double() - expected.detach().double()).abs().max()
    if not torch.isfinite(difference):
        return float("inf")
    scale = expected.detach().double().abs().max().clamp(min=least)
    return (difference / scale).item() if scale > 0 else difference.item()


def assert_near(actual, expected, tolerance, name="", least=0.0):
    """Assert equal shapes and a relative error within `tolerance`."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(actual, expected, least)
    assert error <= tolerance, f"{name}: relative error {error:.2e}, tolerated {tolerance:.0e}"


def assert_all_near(actual, expected, tolerance, least=0.0):
    """`assert_near` over two dicts with the same keys."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_near(actual[name], expected[name], tolerance, name, least)


def in_another_process(code, **environment):
    """What a fresh Python prints that runs `code` with these variables; warnings are errors there too."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
