"""The guard names an input as its caller does, and takes a log-decay of -inf for what it is: valid."""

import math

import pytest
import torch

from anymamba import SsdPath, check_finite
from anymamba.scan import rotated_trapezoid_scan, scan, ssd, trapezoid_scan
from tests.scan.cases import ALGORITHMS
from tests.scan.test_causality import rotated_case, scan_case, ssd_case, trapezoid_case

CASES = {scan: scan_case, ssd: ssd_case, trapezoid_scan: trapezoid_case, rotated_trapezoid_scan: rotated_case}


def make(function):
    _, tokens, constants = CASES[function](2, 1)
    inputs = {**tokens, **constants}
    if function is trapezoid_scan:
        inputs |= {"previous_v": torch.randn(2, 1, 4, 3), "previous_k": torch.randn(2, 1, 2, 5)}
    if function is not rotated_trapezoid_scan:
        inputs["initial_state"] = torch.randn(2, 4, 3, 5)
    return inputs


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function in CASES for name in make(function) if name != "D"]
)
def test_an_input_is_named_as_its_caller_names_it(function, name):
    inputs = make(function)
    inputs[name].view(-1)[1] = math.nan
    with check_finite(), pytest.raises(FloatingPointError, match=rf"^{function.__name__}: input {name} is not finite"):
        function(**inputs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("function", [scan, trapezoid_scan, rotated_trapezoid_scan])
def test_a_log_decay_may_be_minus_infinity(function, algorithm):
    inputs = make(function)
    inputs["log_decay"][0, 3] = -math.inf
    with check_finite():
        y = function(**inputs, path=SsdPath(algorithm, 4))[0]
    assert y.isfinite().all()
