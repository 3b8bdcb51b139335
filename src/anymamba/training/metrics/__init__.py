"""What a run shows while it trains.

Read loggers.py (metrics.csv, plots, TensorBoard, Weights & Biases), then progress.py (the terminal).

A step's metrics: the trainer makes a `StepMetrics`, every `Log` gets it, `MetricsTable` appends a row to metrics.csv,
and `ProgressDisplay` shows it.
"""

from anymamba.training.metrics.loggers import StepMetrics as StepMetrics
from anymamba.training.metrics.loggers import can_plot as can_plot
from anymamba.training.metrics.loggers import read_metrics as read_metrics
