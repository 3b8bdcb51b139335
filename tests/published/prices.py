"""CryptoMamba: Mamba-1 models that predict tomorrow's price from the last fourteen days.

The model reads a window of days as a sequence of its features: (b features days). Stages of four residual Mamba-1
layers, each with a LayerNorm before it, end in a linear map of the days to the next stage's width, the last to 1; a
linear map over the features makes one price of that. Prices are in dollars and not scaled, the volume in billions.
The README has the errors on the days of the test file; they are read from there.
"""

import csv
import io
import re
from itertools import pairwise

import torch
from torch import Tensor, nn

from anymamba import Mamba1
from tests.published.clone import Clone, load_weights
from tests.published.row import Figure, Options, Row, same_digits

COMMIT = "fef42727861a9c3a32241283ab981ef21a49e291"
TEST_DAYS = "data/2018-09-17_2024-09-16_86400/test.csv"
FEATURES = ("Timestamp", "Open", "High", "Low", "Close", "Volume")
MODELS = {"CryptoMamba": "checkpoints/cmamba_nv.ckpt", "CryptoMamba-v": "checkpoints/cmamba_v.ckpt"}
PREFIX = "model."


class PriceLayer(nn.Module):
    """A residual Mamba-1 layer."""

    def __init__(self, d_model: int, d_state: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.op = Mamba1(d_model, d_state=d_state)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.op(self.norm(x))


class PriceModel(nn.Module):
    """Stages of layers, (b features days) -> (b), with the names of the published state dict."""

    def __init__(self, widths: list[int], num_layers: int, d_state: int, num_features: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(PriceLayer(width, d_state) for _ in range(num_layers)), nn.Linear(width, following))
            for width, following in pairwise(widths)
        )
        self.post_process = nn.ModuleList([nn.Identity(), nn.Linear(num_features, 1)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.blocks:
            x = stage(x)
        return self.post_process[1](x.squeeze(-1)).squeeze(-1)


def read_model(clone: Clone, path: str) -> PriceModel:
    """Return a published model; its sizes are those of its tensors."""
    saved = clone.read_pickle(path, "state_dict")["state_dict"]
    state = {name.removeprefix(PREFIX): tensor for name, tensor in saved.items()}
    stages = sorted({int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.0\.norm\.weight$", name))})
    try:
        widths = [state[f"blocks.{stage}.0.norm.weight"].numel() for stage in stages]
        num_layers = sum(bool(re.match(r"blocks\.0\.\d+\.norm\.weight$", name)) for name in state)
        d_state = state["blocks.0.0.op.A_log"].shape[1]
        num_features = state["post_process.1.weight"].shape[1]
    except (KeyError, IndexError) as error:
        raise ValueError(f"{path}: not the weights of a price model: no tensor {error}") from error
    model = PriceModel([*widths, 1], num_layers, d_state, num_features)
    load_weights(path, model, state)
    return model.eval()


def read_windows(clone: Clone, num_features: int, num_days: int) -> tuple[Tensor, Tensor]:
    """Return the windows (b features days) and the closing price of the day after each, both in float32.

    The published evaluation leaves out the last window.
    """
    lines = list(csv.DictReader(io.StringIO(clone.read_text(TEST_DAYS))))
    try:
        columns = [torch.tensor([float(line[name]) for line in lines], dtype=torch.float64) for name in FEATURES]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{TEST_DAYS}: expected columns of numbers {', '.join(FEATURES)} ({error})") from error
    columns[-1] = columns[-1] / 1e9
    days = torch.stack(columns[:num_features]).float()
    windows = days.unfold(1, num_days, 1).transpose(0, 1)
    count = days.shape[1] - num_days - 1
    close = days[FEATURES.index("Close")]
    return windows[:count], close[num_days : num_days + count]


def read_published(clone: Clone, name: str) -> list[str]:
    """Return the RMSE, MAPE and MAE that the README states for a model."""
    number = r"\s*\**([\d.]+)\**\s*"
    match = re.search(rf"^\|\s*{name}\s*\|{number}\|{number}\|{number}\|", clone.read_text("README.md"), re.MULTILINE)
    if match is None:
        raise ValueError(f"README.md: expected a row of three errors for {name}, found none")
    return list(match.groups())


def compare(clone: Clone, options: Options) -> list[Figure]:
    """Compare the errors on the test days."""
    dtype = options.dtype or torch.float32
    figures = []
    for name, path in MODELS.items():
        published = read_published(clone, name)
        model = read_model(clone, path).to(dtype)
        num_features = model.post_process[1].in_features
        num_days = model.blocks[0][0].op.config.d_model
        windows, prices = read_windows(clone, num_features, num_days)
        error = model(windows.to(dtype)).double() - prices.double()
        rmse = error.square().mean().sqrt().item()
        mape = 100 * (error.abs() / prices.double()).mean().item()
        mae = error.abs().mean().item()
        for measure, text, ours in zip(("RMSE", "MAPE %", "MAE"), published, (rmse, mape, mae), strict=True):
            figures.append(same_digits(f"{name}, {measure}", text, ours))
    return figures


ROW = Row(
    name="prices",
    title="Mamba-1 price predictions: errors on the test days",
    repository="MShahabSepehri/CryptoMamba",
    commit=COMMIT,
    compare=compare,
)
