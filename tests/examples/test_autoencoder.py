"""An autoencoder of digits: patches, principal components, and a short run of the command."""

import pytest
import torch

from examples.autoencoder.__main__ import main, reconstruct_by_components
from examples.autoencoder.model import Autoencoder, to_images, to_patches
from tests.support import assert_near


def test_patches_are_squares_of_neighbors_and_come_back():
    images = torch.arange(128.0).view(2, 64)
    patches = to_patches(images)
    assert patches.shape == (2, 16, 4)
    assert patches[0, 0].tolist() == [0, 1, 8, 9]
    assert patches[0, 5].tolist() == [18, 19, 26, 27]
    assert torch.equal(to_images(patches), images)


def test_nothing_but_the_code_reaches_the_drawing():
    model = Autoencoder(code=3, d_model=16, n_layer=2, family="Mamba2", d_state=8, headdim=8).double()
    images = torch.rand(2, 64, dtype=torch.float64)
    code = model.encode(images)
    assert code.shape == (2, 3)
    assert_near(model(images), model.decode(code), 1e-12)


def test_principal_components_are_the_best_linear_code():
    torch.manual_seed(0)
    training = torch.randn(50, 64, dtype=torch.float64)
    assert_near(reconstruct_by_components(training, training, 49), training, 1e-10)
    errors = [(reconstruct_by_components(training, training, k) - training).square().sum() for k in (1, 8, 32)]
    centered = training - training.mean(0)
    values = torch.linalg.svdvals(centered)
    for k, error in zip((1, 8, 32), errors, strict=True):
        assert_near(error, values[k:].square().sum(), 1e-10)


def test_the_command_writes_a_table_and_a_picture(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert main(["--steps", "8", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "autoencoder.md").read_text() == out.removesuffix("\n")
    assert (tmp_path / "autoencoder.png").read_bytes().startswith(b"\x89PNG")
    ours, linear = (float(line.split("|")[2]) for line in out.splitlines()[2:4])
    assert linear < ours < 0.3  # few steps draw gray images
