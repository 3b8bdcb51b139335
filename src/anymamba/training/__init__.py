"""Training: config, data, optimizer, checkpoints, and the loop."""

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
    from anymamba.training.tasks.predict import Predictor as Predictor
    from anymamba.training.tasks.tabular import TabularTask as TabularTask
    from anymamba.training.tasks.tabular_tasks import make_task as make_task
    from anymamba.training.tasks.task import Evaluation as Evaluation
    from anymamba.training.tasks.task import Task as Task
    from anymamba.training.tasks.task import autocast as autocast
    from anymamba.training.trainer import Trainer as Trainer

_NEEDS_TORCH = {
    "train": "anymamba.training.api",
    "resume": "anymamba.training.api",
    "StepMetrics": "anymamba.training.metrics.loggers",
    "can_plot": "anymamba.training.metrics.loggers",
    "read_metrics": "anymamba.training.metrics.loggers",
    "Predictor": "anymamba.training.tasks.predict",
    "TabularTask": "anymamba.training.tasks.tabular",
    "make_task": "anymamba.training.tasks.tabular_tasks",
    "Evaluation": "anymamba.training.tasks.task",
    "Task": "anymamba.training.tasks.task",
    "autocast": "anymamba.training.tasks.task",
    "Trainer": "anymamba.training.trainer",
    "train_or_resume": "anymamba.training.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name that needs torch on demand: the command line makes its options without torch."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_NEEDS_TORCH[name]), name)
