import pytest
import torch

from anymamba.core.dtypes import available_devices, parse_device, resolve_device
from anymamba.core.registry import describe_device


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_is_the_first_device_of_the_machine(has_cuda, has_mps, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert available_devices()[-1] == "cpu"
    assert resolve_device("auto") == parse_device("auto", "--device") == torch.device(expected)
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has the device")
def test_a_missing_device_is_an_error_of_one_line():
    with pytest.raises(ValueError, match=r"^--device mps: not available here; available are [^\n]*$"):
        parse_device("mps", "--device")


def test_a_device_without_kernels_is_described_with_the_reason():
    assert describe_device(torch.device("cpu")) == "cpu"
    assert describe_device(torch.device("meta")) == "meta, in portable code: there is none for device meta"
