"""No output depends on a later token, not even in its last bit: on every scan, path, layout and family."""

import pytest
import torch

from anymamba import SsdPath
from anymamba.scan import rotated_trapezoid_scan, scan, selective_scan, ssd, trapezoid_scan
from tests.blocks.families import ALGORITHMS as ALGORITHMS_OF
from tests.blocks.families import FEW, OPTIONS, PATHWAYS, make_block
from tests.scan.cases import ALGORITHMS

T, CUTS, BOUNDS = 13, (1, 4, 5, 12), [0, 2, 7, 13]


def normal(*shape):
    return torch.randn(shape)


def scan_case(b, r):
    tokens = {"v": normal(b, T, r, 4, 3), "k": normal(b, T, r, 2, 5), "q": normal(b, T, r, 2, 5)}
    return scan, {**tokens, "log_decay": -normal(b, T, 4).abs()}, {}


def ssd_case(b, r):
    tokens = {"x": normal(b, T, 4, 3), "dt": normal(b, T, 4).abs(), "B": normal(b, T, 2, 5), "C": normal(b, T, 2, 5)}
    return ssd, tokens, {"A": -normal(4).abs(), "D": normal(4)}


def trapezoid_case(b, r):
    _, tokens, _ = scan_case(b, r)
    return trapezoid_scan, {**tokens, "gamma": normal(b, T, 4).abs(), "kappa": normal(b, T, 4).abs()}, {}


def rotated_case(b, r):
    rows = b if b > 1 else len(BOUNDS) - 1
    _, tokens, _ = trapezoid_case(b, r)
    del tokens["v"]
    tokens |= {"x": normal(b, T, 4, 3), "angular_rate": normal(b, T, 2), "dt": normal(b, T, 4).abs()}
    cache = {"initial_state": normal(rows, 4, 3, 5), "previous_k": normal(rows, r, 4, 5)}
    cache |= {"previous_x": normal(rows, 4, 3), "initial_rotation": normal(rows, 4, 2)}
    weights = {"k_bias": normal(4, r, 5), "q_bias": normal(4, r, 5), "D": normal(4), "value_weight": normal(4, r, 3)}
    return rotated_trapezoid_scan, tokens, {**cache, **weights}


def selective_case(b, r):
    tokens = {name: normal(b, T, 6) for name in ("x", "dt", "z")} | {name: normal(b, T, 5) for name in ("B", "C")}
    return selective_scan, tokens, {"A": -normal(6, 5).abs(), "D": normal(6)}


PATHS = [(case, algorithm, "single", 1) for case in (scan_case, ssd_case) for algorithm in ALGORITHMS]
PATHS += [(scan_case, algorithm, "single", 2) for algorithm in ALGORITHMS]
PATHS += [
    (case, algorithm, pathway, r)
    for case in (trapezoid_case, rotated_case)
    for algorithm in ALGORITHMS
    for pathway in ("single", "double")
    for r in (1, 2)
]
PATHS += [
    (selective_case, algorithm, "single", 1) for algorithm in ALGORITHMS if algorithm not in ("minimal", "serial")
]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize(("case", "algorithm", "pathway", "r"), PATHS)
def test_outputs_of_a_scan_do_not_depend_on_later_tokens(case, algorithm, pathway, r, packed):
    function, tokens, constants = case(1 if packed else 2, r)
    later = {name: -x.abs() * 3 if name == "log_decay" else x * 3 for name, x in tokens.items()}
    options = {"path": SsdPath(algorithm, 4, pathway), "cu_seqlens": torch.tensor(BOUNDS) if packed else None}
    y = function(**tokens, **constants, **options)[0]
    for cut in CUTS:
        changed = {name: torch.cat([x[:, :cut], later[name][:, cut:]], 1) for name, x in tokens.items()}
        y_changed = function(**changed, **constants, **options)[0]
        assert torch.equal(y_changed[:, :cut], y[:, :cut])
        assert not torch.equal(y_changed[:, cut:], y[:, cut:])


@pytest.mark.parametrize("layout", ["rows", "packed", "padded"])
@pytest.mark.parametrize("options", FEW)
def test_outputs_of_a_block_do_not_depend_on_later_tokens(options, layout):
    family = OPTIONS[options][0]
    block = make_block(options, dtype=torch.float32)
    x, other = torch.randn(2, 1, T, 16)
    extra = {}
    if layout == "packed":
        extra["cu_seqlens"] = torch.tensor(BOUNDS)
    elif layout == "padded":
        x, other = torch.randn(2, 2, T, 16)
        extra["mask"] = torch.tensor([T, T - 3])
    with torch.no_grad():
        for pathway in PATHWAYS[family]:
            for algorithm in ALGORITHMS_OF[family]:
                path = SsdPath(algorithm, 4, pathway)
                y = block(x, path=path, **extra)
                for cut in CUTS:
                    y_changed = block(torch.cat([x[:, :cut], other[:, cut:]], 1), path=path, **extra)
                    assert torch.equal(y_changed[:, :cut], y[:, :cut])
                    assert not torch.equal(y_changed[:, cut:], y[:, cut:])
