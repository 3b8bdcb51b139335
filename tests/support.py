"""Comparisons that several tests share, and the one policy for equality.

Bits are compared where one code path runs the same operations in the same order by construction, and nowhere else:

    any number of threads                      our kernels hand out whole tasks, and sum partial results in one order
    a row alone and in a batch                 our kernels and programs; not through torch's own matrix products, which
                                               choose another blocking for another number of rows
    a resumed run and an undisturbed one       the same calls from the same bits
    what was written and what is read          files, copies, slices and moves compute nothing
    one call twice, or through two names       `block(x)` and `block.prefill(x)[0]`; lengths and the mask they mean

Everything else, of two lengths, two algorithms, two processors or two libraries, is compared with float64, relative to
the largest entry, within a floor of the tables below. What was recorded elsewhere is held to the same distance, so that
the sum of the two is never mistaken for our own error. Tokens that are chosen by two different computations are
compared in float64, where a draw that falls between the two is a matter of 1e-15 and not of 1e-6.
"""

import os
import shutil
import subprocess
import sys

import torch

# An operator or a block: largest difference from the oracle, relative to the oracle's largest entry. Measured over the
# suite's cases on the portable paths: float64 4e-15, float32 2e-6, and one rounding of the output for half precisions.
FLOOR = {torch.float64: 1e-10, torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

# The logits and log-probabilities of a whole float32 model, ours and a reference's, against ours in float64. Measured
# over the golden models: at most 7e-6, of Mamba-1.
MODEL_FLOOR = 3e-5

# A list of losses that was recorded on another processor, in float64: a training run multiplies what differs in the
# last bit. Measured with the kernels' baseline and wide variants, 8 steps: at most 6e-16.
LOSSES_FLOOR = 1e-9


def relative_error(actual, expected, least=0.0):
    """Return the largest difference relative to the largest entry of `expected` or `least`; inf if not finite."""
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
    """Assert `assert_near` over two dicts with the same keys."""
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_near(actual[name], expected[name], tolerance, name, least)


def in_another_process(code, **environment):
    """Run `code` in a new Python with these variables and warnings as errors, and return its output."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def chromium():
    """Return the path of a browser that can be driven, None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
