"""Inputs and outputs of the official Mamba-3 kernels on a GPU, and the published 187m models that some come from.

A capture is a call of `mamba3_siso_combined` or `mamba3_mimo_combined`: keys, queries, values and gates in bfloat16,
step sizes and log-decays in float32, and the output in bfloat16. The kernels multiply in bfloat16 inside, so that two
correct implementations differ by a few roundings of the largest entry. The README states by how many a reference in
float64 differs; ours computes the same inputs in float32 (or `--dtype`) and must be as near. The folder of each model
also has its config, with the names and shapes of its parameters. One more file holds the inputs of the scan in the
first layer of mamba-130m, with the result in float64.
"""

import re

import numpy as np
import torch
from torch import Tensor

from anymamba import MambaLM, MambaLMConfig
from anymamba.compat.selective_scan_interface import selective_scan_fn
from anymamba.ops import rank_gate
from anymamba.scan import rotated_trapezoid_scan
from tests.published.clone import Clone, MissingFileError, check_fields
from tests.published.row import Figure, Options, Row, near
from tests.support import FLOOR

COMMIT = "183044043dea278f2c08f7f4f2ec07211738aa96"
FOLDERS = {"siso": "tests/golden/mamba3", "mimo": "tests/golden/mamba3_mimo"}
UNIT = 2.0**-8  # a rounding of bfloat16, relative to the largest entry
MAMBA1 = "tests/golden/hf_mixer_layer0.npz"
INPUTS = ("Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "Angles", "D", "Z")
RANK_INPUTS = ("MIMO_V", "MIMO_Z", "MIMO_Out")


def run_capture(path: str, arrays: dict[str, np.ndarray | Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return our output for the inputs of a capture, and the captured one, both (b t h p)."""
    is_mimo = "kw_MIMO_V" in arrays
    names = (*INPUTS, *RANK_INPUTS) if is_mimo else INPUTS
    check_fields(path, arrays, *(f"kw_{name}" for name in names), "out")
    inputs = {name: torch.as_tensor(arrays[f"kw_{name}"]).to(dtype) for name in names}
    q, k, v, z = (inputs[name] for name in "QKVZ")
    q_bias, k_bias = inputs["Q_bias"], inputs["K_bias"]
    if not is_mimo:
        q, k, q_bias, k_bias = q.unsqueeze(2), k.unsqueeze(2), q_bias.unsqueeze(1), k_bias.unsqueeze(1)
    log_decay, dt = inputs["ADT"].transpose(1, 2), inputs["DT"].transpose(1, 2)
    share = torch.sigmoid(inputs["Trap"].transpose(1, 2))
    angles = inputs["Angles"]
    if not torch.equal(angles, angles[:, :, :1].expand_as(angles)):
        raise ValueError(f"{path}: expected the same angles for every head")
    (b, _, h, p), r, n = v.shape, k.shape[2], k.shape[-1]
    y, *_ = rotated_trapezoid_scan(
        v,
        k,
        q,
        k_bias,
        q_bias,
        torch.pi * torch.tanh(angles[:, :, 0]),
        dt,
        log_decay,
        share * dt,
        (1 - share) * dt,
        inputs["D"],
        inputs.get("MIMO_V"),
        initial_state=v.new_zeros(b, h, p, n),
        previous_k=v.new_zeros(b, r, h, n),
        previous_x=v.new_zeros(b, h, p),
        initial_rotation=v.new_zeros(b, h, angles.shape[-1]),
        rotation_kind="halves" if is_mimo else "interleaved",
    )
    gated = rank_gate(y, z, inputs.get("MIMO_Z"), inputs.get("MIMO_Out"))
    return gated, torch.as_tensor(arrays["out"])


def units(output: Tensor, captured: Tensor) -> float:
    """Return the largest difference of the output, rounded to bfloat16, in units of the largest captured entry."""
    rounded, captured = output.bfloat16().double(), captured.double()
    return ((rounded - captured).abs().max() / (captured.abs().max() * UNIT)).item()


def read_published_units(clone: Clone) -> dict[str, float]:
    """Return the largest difference that the README states for each kernel, of a float64 reference."""
    pattern = r"^\| Reference vs the official .*?\| \**([\d.]+) bf16 ULP\** \| ([\d.]+) \|"
    match = re.search(pattern, clone.read_text("README.md"), re.MULTILINE)
    if match is None:
        raise ValueError("README.md: expected a row with the differences of the reference, found none")
    return {"mimo": float(match[1]), "siso": float(match[2])}


def compare_captures(clone: Clone, kind: str, dtype: torch.dtype) -> list[Figure]:
    """Compare every capture of a model that the clone has; name those that it lacks."""
    folder = FOLDERS[kind]
    manifest = clone.read_json(f"{folder}/manifest.json", "cases", "model", "device")
    missing, worst, count = [], 0.0, 0
    for case in manifest["cases"]:
        path = f"{folder}/{check_fields(folder, case, 'name')['name']}.npz"
        try:
            arrays = clone.read_arrays(path)
        except MissingFileError:
            missing.append(case["name"])
            continue
        worst = max(worst, units(*run_capture(path, arrays, dtype)))
        count += 1
    if not count:
        raise ValueError(f"{folder}: expected captures, this clone lacks all {len(missing)}")
    published = read_published_units(clone)[kind]
    title = f"{kind}: bfloat16 units from {count} outputs of a {manifest['device']}"
    agrees = worst <= published + 0.5
    figures = [Figure(title, f"{published:.2f}", f"{worst:.2f}", agrees, "at most half a unit more")]
    if missing:
        criterion = f"this clone lacks {', '.join(missing)}"
        figures.append(Figure(f"{kind}: further outputs", f"{len(missing)}", "not run", None, criterion))
    return figures


def compare_parameters(clone: Clone, kind: str) -> Figure:
    """Compare names and shapes of all parameters with those of our model for the same config."""
    path = f"{FOLDERS[kind]}/model_shape.json"
    shapes = clone.read_json(path, "config", "parameters")
    theirs = {name: tuple(shape) for name, shape in shapes["parameters"].items()}
    model = MambaLM(MambaLMConfig.from_dict(shapes["config"]), device="meta")
    ours = {name: tuple(x.shape) for name, x in model.named_parameters()}
    equal = sum(theirs.get(name) == shape for name, shape in ours.items())
    criterion = "the same names and shapes"
    return Figure(f"mamba3-{kind}-187m: parameters", f"{len(theirs)}", f"{equal} equal", ours == theirs, criterion)


def compare_mamba1(clone: Clone, dtype: torch.dtype) -> Figure:
    """Compare the scan of a layer of mamba-130m."""
    arrays = clone.read_arrays(MAMBA1, "u", "delta", "A", "B", "C", "D_skip", "z", "out_f64")
    u, delta, A, B, C, D, z = (
        torch.from_numpy(arrays[name]).to(dtype) for name in ("u", "delta", "A", "B", "C", "D_skip", "z")
    )
    y = selective_scan_fn(u, delta, A, B, C, D, z, delta_softplus=False)
    expected = torch.from_numpy(arrays["out_f64"])
    return near("mamba-130m, layer 0: scan", expected, y, FLOOR[dtype], "transformers' inputs, in float64")


def compare(clone: Clone, options: Options) -> list[Figure]:
    """Compare the captures and the shapes of both models."""
    dtype = options.dtype or torch.float32
    figures = []
    for kind in FOLDERS:
        figures += [*compare_captures(clone, kind, dtype), compare_parameters(clone, kind)]
    return [*figures, compare_mamba1(clone, dtype)]


ROW = Row(
    name="captures",
    title="Calls of the official Mamba-3 kernels on a GPU, with the published 187m models",
    repository="AdityaP9116/ARMHackathon",
    commit=COMMIT,
    compare=compare,
)
