"""Devices by the names that users give them."""

from __future__ import annotations

import torch


def find_device(name: str, option: str) -> torch.device:
    """The device of that name; `option` says how it was given, such as "--device".

    Raises:
        ValueError: it is not available.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{option} {name}: not available here ({str(error).splitlines()[0]})") from error
    return device
