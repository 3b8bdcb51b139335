import pytest
import torch
import torch.nn.functional as F

from anymamba.blocks.layers import CausalConv
from tests.support import FLOOR, assert_near

pytestmark = pytest.mark.usefixtures("each_implementation")


def reference(x, window, conv):
    """Compute torch's own convolution over the window's tail and the input."""
    s = torch.cat([window.transpose(1, 2), x], 1)[:, 1:]
    return F.silu(F.conv1d(s.transpose(1, 2), conv.weight, conv.bias, groups=x.shape[2])).transpose(1, 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("t", [1, 2, 9])
def test_it_equals_torchs_convolution_in_values_and_gradients(t, width, bias):
    conv = CausalConv(5, width, bias=bias, dtype=torch.float64)
    x = torch.randn(2, t, 5, dtype=torch.float64, requires_grad=True)
    window = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
    leaves = (x, window, *conv.parameters())
    out, new_window = conv(x, window)
    expected = reference(x, window, conv)
    assert_near(out, expected, FLOOR[torch.float64])
    assert torch.equal(new_window, torch.cat([window, x.transpose(1, 2)], 2)[..., -width:])
    head, window_head = torch.randn_like(out), torch.randn_like(new_window)
    loss = (out * head).sum() + (new_window * window_head).sum()
    expected_window = torch.cat([window, x.transpose(1, 2)], 2)[..., -width:]
    expected_loss = (expected * head).sum() + (expected_window * window_head).sum()
    for actual, expected_grad in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected_loss, leaves), strict=True
    ):
        assert_near(actual, expected_grad, FLOOR[torch.float64])


def test_steps_equal_the_sequence():
    conv = CausalConv(5, 4, dtype=torch.float64)
    x, window = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    out, last = conv(x, window)
    for t in range(7):
        out_t, window = conv(x[:, t : t + 1], window)
        assert_near(out_t, out[:, t : t + 1], FLOOR[torch.float64])
    assert torch.equal(window, last)


def test_rows_end_at_their_lengths():
    conv = CausalConv(5, 4, dtype=torch.float64)
    x, window = torch.randn(3, 6, 5, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    lengths = torch.tensor([0, 2, 6])
    out, last = conv(x, window, lengths=lengths)
    assert torch.equal(last[0], window[0])
    for row, length in enumerate(lengths.tolist()):
        if length:
            alone, last_alone = conv(x[row : row + 1, :length], window[row : row + 1])
            assert_near(out[row : row + 1, :length], alone, FLOOR[torch.float64])
            assert torch.equal(last[row : row + 1], last_alone)


@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64])
def test_packed_sequences_start_from_their_own_windows(cu_dtype):
    conv = CausalConv(5, 4, dtype=torch.float64)
    bounds = [0, 1, 4, 12]
    x = torch.randn(1, 12, 5, dtype=torch.float64)
    windows = torch.randn(3, 5, 4, dtype=torch.float64)
    out, last = conv(x, windows, cu_seqlens=torch.tensor(bounds, dtype=cu_dtype))
    for row in range(3):
        part = slice(bounds[row], bounds[row + 1])
        alone, last_alone = conv(x[:, part], windows[row : row + 1])
        assert_near(out[:, part], alone, FLOOR[torch.float64])
        assert torch.equal(last[row : row + 1], last_alone)


def test_it_is_initialized_as_torchs_convolution():
    conv = CausalConv(1000, 4)
    bound = 0.5
    for parameter in conv.parameters():
        assert parameter.abs().max() <= bound
        assert 0.2 < parameter.std() < 0.35
