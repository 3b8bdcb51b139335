"""A stand-in for the official packages `mamba_ssm` and `causal_conv1d`: code that imports them runs on anymamba."""

from anymamba.compat.install import install as install
from anymamba.compat.install import uninstall as uninstall
