"""Training: config, data, optimiser, checkpoints, and the loop."""

from anymamba.training.config import TrainingConfig as TrainingConfig
from anymamba.training.config import read_config as read_config
