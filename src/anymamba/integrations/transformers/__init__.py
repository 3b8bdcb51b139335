"""transformers' own Mamba models, correct and fast on a CPU: `model = accelerate(model)`.

The class of every mixer is replaced by a subclass whose forward runs on this library's operators. The classes of models
that are nothing but mixers, and of large projections, are replaced too, for single tokens. Parameters, names,
submodules, caches and configs remain transformers' own, and `restore` undoes it.
"""

from anymamba.integrations.transformers.accelerate import accelerate as accelerate
from anymamba.integrations.transformers.accelerate import disable as disable
from anymamba.integrations.transformers.accelerate import enable as enable
from anymamba.integrations.transformers.accelerate import restore as restore
from anymamba.integrations.transformers.acceleration_report import LayerReport as LayerReport
from anymamba.integrations.transformers.acceleration_report import ModelReport as ModelReport
from anymamba.integrations.transformers.acceleration_report import Report as Report
from anymamba.integrations.transformers.acceleration_report import report as report
