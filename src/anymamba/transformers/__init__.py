"""transformers' own Mamba models, correct and fast on a CPU: `model = accelerate(model)`.

The class of every mixer is replaced by a subclass whose forward runs on this library's operators. The classes of models
that are nothing but mixers, and of large projections, are replaced too, for single tokens. Parameters, names,
submodules, caches and configs remain transformers' own, and `restore` undoes it.
"""

from anymamba.transformers.enabling import disable as disable
from anymamba.transformers.enabling import enable as enable
from anymamba.transformers.report import LayerReport as LayerReport
from anymamba.transformers.report import ModelReport as ModelReport
from anymamba.transformers.report import Report as Report
from anymamba.transformers.report import report as report
from anymamba.transformers.swap import accelerate as accelerate
from anymamba.transformers.swap import restore as restore
