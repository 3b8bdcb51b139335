"""Training: language models on text, and sequence models on tables, from a config to a model in a directory.

It exists so that a run can be stopped at any point (by Ctrl-C, a kill, a full disk) and continues with the same bits,
on any number of ranks.

Read in this order:

    api.py               train, resume: how a run is checked, created in a directory, and opened again
    config/              the fields of a run, their TOML file and their command line options
    tasks/               what is learned: the model, its batches, its loss and its evaluation
    evaluation.py        bits per byte of the held-out text, and a sample
    data/                text to documents, tokens, shards and batches; baselines; files to tables
    trainer.py           the loop
    layer_execution.py   layers that are compiled, or recomputed in the backward pass
    optim/               AdamW and Muon, by parts of parameters
    distributed/         the ranks of a run: their mesh, messages, weights and gradients
    checkpoint/          saving and resuming
    metrics/             metrics.csv, plots, loggers, progress

A batch, from the disk to the checkpoint:

1. `Trainer._take_step` asks the task for the microbatches of a step (`LanguageTask.batches`).
2. `Batches.step` (data/batches.py) derives from seed and step which rows to read, reads them from shards
   (data/shards.py), and packs them with a boundary wherever a document begins.
3. `LanguageTask.loss` runs the model; the loss is summed over targets and divided by the targets of all ranks.
4. The backward pass leaves gradients, which are summed over ranks (distributed/fsdp.py) and clipped.
5. `Optimizer.step` (optim/optimizer.py) updates the parameters, some of them with Muon (optim/muon.py).
6. `StepMetrics` of the step go to metrics.csv and the other loggers (metrics/loggers.py) and to the terminal.
7. Every so often the model is scored on held-out text (evaluation.py), and `Saver` (checkpoint/saver.py) writes
   everything that a resumed run needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anymamba.training.config.run_config import RunConfig as RunConfig
from anymamba.training.config.run_config import TrainingConfig as TrainingConfig
from anymamba.training.config.run_config import read_config as read_config
from anymamba.training.config.sections import CheckpointSection as CheckpointSection
from anymamba.training.config.sections import EvaluationSection as EvaluationSection
from anymamba.training.config.sections import OptimizerSection as OptimizerSection
from anymamba.training.config.sections import ScheduleSection as ScheduleSection
from anymamba.training.config.sections import check_at_least as check_at_least
from anymamba.training.config.sections import option as option
from anymamba.training.config.tabular_config import TabularConfig as TabularConfig

if TYPE_CHECKING:
    from anymamba.training.api import resume as resume
    from anymamba.training.api import train as train
    from anymamba.training.api import train_or_resume as train_or_resume
    from anymamba.training.metrics.loggers import StepMetrics as StepMetrics
    from anymamba.training.metrics.loggers import can_plot as can_plot
    from anymamba.training.metrics.loggers import read_metrics as read_metrics
    from anymamba.training.optim.optimizer import parameter_groups as parameter_groups
    from anymamba.training.optim.optimizer import plan as plan
    from anymamba.training.tasks.predict import Predictor as Predictor
    from anymamba.training.tasks.tabular_base import TabularTask as TabularTask
    from anymamba.training.tasks.tabular_tasks import make_task as make_task
    from anymamba.training.tasks.task import Evaluation as Evaluation
    from anymamba.training.tasks.task import Task as Task
    from anymamba.training.tasks.task import autocast as autocast
    from anymamba.training.trainer import Trainer as Trainer

_NEEDS_TORCH = {
    "api": ("resume", "train", "train_or_resume"),
    "metrics.loggers": ("StepMetrics", "can_plot", "read_metrics"),
    "optim.optimizer": ("parameter_groups", "plan"),
    "tasks.predict": ("Predictor",),
    "tasks.tabular_base": ("TabularTask",),
    "tasks.tabular_tasks": ("make_task",),
    "tasks.task": ("Evaluation", "Task", "autocast"),
    "trainer": ("Trainer",),
}
_MODULES = {name: f"anymamba.training.{module}" for module, names in _NEEDS_TORCH.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name that needs torch on demand: the command line makes its options without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
