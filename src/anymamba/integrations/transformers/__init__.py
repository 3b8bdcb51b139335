"""The Mamba models of transformers, correct and fast on a CPU: `model = accelerate(model)`.

The class of every mixer is replaced by a subclass whose forward runs on this library's operators. The classes of models
that consist of mixers only, and of large projections, are replaced, too, for single tokens. Parameters, names,
submodules, caches and configs remain those of transformers, and `restore` undoes it. The package is also importable as
`anymamba.transformers`.

In reading order: `accelerate.py` (replace, check, restore), `architectures.py` (the mixers of transformers and their
caches), `accelerated_classes.py` (a subclass for each), `mixer.py` (the common forward), `mamba_mixers.py` (the
computation of Mamba-1 and Mamba-2), `packing.py` (packed and padded batches), `model_step.py` and `linear_layers.py`
(single tokens outside of mixers), `acceleration_report.py`.

A batch on its way through an accelerated mixer: `forward` reads the state of its layer from the cache of transformers;
one token per row runs the compiled step in place; otherwise the layout joins or compacts the rows, `mix` computes
projections, convolution and scan from that state, and the layout restores the rows and the cache.
"""

from anymamba.integrations.transformers.accelerate import accelerate as accelerate
from anymamba.integrations.transformers.accelerate import disable as disable
from anymamba.integrations.transformers.accelerate import enable as enable
from anymamba.integrations.transformers.accelerate import restore as restore
from anymamba.integrations.transformers.acceleration_report import LayerReport as LayerReport
from anymamba.integrations.transformers.acceleration_report import ModelReport as ModelReport
from anymamba.integrations.transformers.acceleration_report import Report as Report
from anymamba.integrations.transformers.acceleration_report import report as report
