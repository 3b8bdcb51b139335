"""Optimizers: AdamW for all parameters, or Muon for hidden matrices.

Read optimizer.py (which parameters are decayed, cut into parts, and given to which optimizer; the schedule), then
muon.py.

A gradient, from the backward pass to the weights: `clip_gradients` scales it, `Optimizer.step` gives each part of a
fused projection its rows, and AdamW or Muon updates them in place.
"""

from anymamba.training.optim.muon import Muon as Muon
from anymamba.training.optim.optimizer import Optimizer as Optimizer
from anymamba.training.optim.optimizer import parameter_groups as parameter_groups
from anymamba.training.optim.optimizer import plan as plan
from anymamba.training.optim.optimizer import plan_table as plan_table
