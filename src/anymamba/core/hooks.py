"""Whether calling a module does more than the `forward` of its class."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
_GLOBAL = (*GLOBAL_HOOKS, torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks)


def has_no_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs its class's `forward` only: no hooks, no patched `forward`."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(_GLOBAL)
        or "forward" in module.__dict__
        or module._compiled_call_impl is not None
    )
