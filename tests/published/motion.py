"""Classifiers of motion data on official Mamba-3 blocks in bfloat16, trained and run on a GPU in May 2026.

A window of accelerometer and gyroscope samples is normalized with the statistics of the training windows, which the
checkpoint holds, projected to the width, goes through residual layers of LayerNorm and Mamba-3, and the last step is
classified. Blocks are in bfloat16 and everything else in float32; the decay rates are by softplus, as officially until
June 2026. The published file of every model lists each test window with its label and the GPU's prediction.

The loss is the mean over batches of 64 of a cross-entropy weighted by class, with the weights of the training windows.
Those are a stratified share of all windows, or the windows of a share of the subjects.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba import Mamba3
from tests.published.clone import Clone, check_fields, load_weights
from tests.published.row import Figure, Options, Row

COMMIT = "677f12b72dec6319d97e8aefdf83cc95126618d2"
RAW = "data/uci_har_pt/RawData"
RUNS = "outputs_user/imu_transition"
SAMPLES = {"acc": (0, 1, 2), "gyro": (3, 4, 5), "acc_gyro": (0, 1, 2, 3, 4, 5)}
FIRST_TRANSITION = 7  # activities 7 to 12 are transitions
GROUPS = {
    "main_5seed": "transitions, random split",
    "subject_5seed": "transitions, unseen subjects",
    "direction_5seed": "seven directions",
    "window_64_3seed": "windows of 64",
    "window_128_3seed": "windows of 128",
    "window_256_3seed": "windows of 256",
}
BATCH = 64


class MotionLayer(nn.Module):
    """A residual Mamba-3 layer, whose block has a dtype of its own."""

    def __init__(self, sizes: dict) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes["d_model"])
        block = {name: sizes[name] for name in ("d_state", "expand", "headdim", "chunk_size")}
        self.mixer = Mamba3(sizes["d_model"], **block, a_activation="softplus", dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x).to(self.mixer.in_proj.weight.dtype)).to(x.dtype)


class MotionClassifier(nn.Module):
    """Logits of a window's last step, (b t c) -> (b classes), with the names of the published state dict."""

    def __init__(self, num_channels: int, num_classes: int, sizes: dict) -> None:
        super().__init__()
        width = sizes["d_model"]
        self.input_proj = nn.Linear(num_channels, width)
        self.blocks = nn.ModuleList(MotionLayer(sizes) for _ in range(sizes["n_layers"]))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_proj(x)
        for layer in self.blocks:
            x = layer(x)
        return self.head(self.norm(x)[:, -1])


@dataclass(frozen=True)
class Window:
    """Where a window begins, and the activity that it shows."""

    recording: tuple[int, int]  # experiment and subject
    start: int
    activity: int


class Recordings:
    """Raw recordings of a clone, each read once: six columns of samples, the accelerometer's first."""

    def __init__(self, clone: Clone) -> None:
        self._clone = clone
        self._samples: dict[tuple[int, int], np.ndarray] = {}
        self._activities = clone.read_table(f"{RAW}/labels.txt", 5).astype(int)

    def samples(self, recording: tuple[int, int]) -> np.ndarray:
        """Return the samples of a recording in float32, (t 6)."""
        if recording not in self._samples:
            suffix = "exp{:02d}_user{:02d}.txt".format(*recording)
            parts = [self._clone.read_table(f"{RAW}/{sensor}_{suffix}", 3) for sensor in ("acc", "gyro")]
            if len(parts[0]) != len(parts[1]):
                raise ValueError(f"{RAW}/*_{suffix}: expected as many lines in both files, got {[*map(len, parts)]}")
            self._samples[recording] = np.concatenate(parts, axis=1).astype(np.float32)
        return self._samples[recording]

    def windows(self, size: int, stride: int) -> list[Window]:
        """Return the windows of every labeled stretch; its first sample counts as 1."""
        return [
            Window((experiment, subject), start, activity)
            for experiment, subject, activity, first, last in self._activities.tolist()
            for start in range(first - 1, min(last, len(self.samples((experiment, subject)))) - size + 1, stride)
        ]


def classify(activities: list[int], num_classes: int) -> np.ndarray:
    """Return the labels of activities: whether it is a transition, or 0 and one class for each transition."""
    shifted = np.maximum(np.array(activities) - FIRST_TRANSITION + 1, 0)
    return shifted if num_classes > 2 else (shifted > 0).astype(int)


def class_weights(windows: list[Window], labels: np.ndarray, config: dict, num_classes: int) -> Tensor:
    """Return n / (classes · n_c) over the training windows of a run."""
    share, seed = config["train_ratio"], config["seed"]
    if config.get("split_mode", "random") == "subject":
        subjects = np.array([window.recording[1] for window in windows])
        order = np.unique(subjects)
        np.random.RandomState(seed).shuffle(order)
        train = labels[np.isin(subjects, order[: round(len(order) * share)])]
    else:
        from sklearn.model_selection import train_test_split

        train, _ = train_test_split(labels, train_size=share, random_state=seed, stratify=labels)
    counts = np.bincount(train, minlength=num_classes)
    return torch.tensor(len(train) / (num_classes * np.maximum(counts, 1)), dtype=torch.float32)


def read_model(clone: Clone, path: str) -> tuple[MotionClassifier, dict]:
    """Return a published model, and what its checkpoint says of the run."""
    saved = clone.read_pickle(path, "channel_mode", "model_config", "config", "state_dict", "normalization")
    if saved.get("model_name") != "mamba3" or saved["channel_mode"] not in SAMPLES:
        raise ValueError(f"{path}: expected a mamba3 model of {'/'.join(SAMPLES)}, got {saved.get('model_name')!r}")
    names = ("d_model", "d_state", "expand", "headdim", "n_layers", "chunk_size")
    sizes = check_fields(f"{path}, model_config", saved["model_config"], *names)
    check_fields(f"{path}, config", saved["config"], "window_size", "stride", "train_ratio", "seed")
    num_classes = 7 if saved["config"].get("task") == "direction" else 2
    model = MotionClassifier(len(SAMPLES[saved["channel_mode"]]), num_classes, sizes)
    load_weights(path, model, saved["state_dict"])
    return model.eval(), saved


def read_test_windows(clone: Clone, path: str, recordings: Recordings, saved: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized test windows of a run, their labels, and the predictions that were published."""
    columns = ("y_true", "y_pred", "test_exp_ids", "test_user_ids", "test_window_starts", "test_activity_ids")
    table = clone.read_json(path, *columns)
    if len({len(table[name]) for name in columns}) != 1:
        raise ValueError(f"{path}: expected columns of one length")
    labels, predictions, experiments, subjects, starts, _ = (table[name] for name in columns)
    size = saved["config"]["window_size"]
    windows = []
    for *recording, start in zip(experiments, subjects, starts, strict=True):
        samples = recordings.samples(tuple(recording))
        if not 0 <= start <= len(samples) - size:
            raise ValueError(f"{path}: a window begins at sample {start} of {len(samples)}")
        windows.append(samples[start : start + size, SAMPLES[saved["channel_mode"]]])
    statistics = check_fields(path, saved["normalization"], "mean", "std")
    mean, std = (np.array(statistics[name], dtype=np.float32) for name in ("mean", "std"))
    return torch.from_numpy((np.stack(windows) - mean) / std), torch.tensor(labels), torch.tensor(predictions)


def compare(clone: Clone, options: Options) -> list[Figure]:
    """Compare predictions and losses of every run, or of one run of each group, by group of runs."""
    recordings = Recordings(clone)
    figures = []
    all_equal = all_windows = 0
    for group, title in GROUPS.items():
        runs = [x.removesuffix("/best.pt") for x in clone.list_files(f"{RUNS}/{group}/") if _is_run(x)]
        if not runs:
            raise ValueError(f"{RUNS}/{group}: expected checkpoints seed*/mamba3_*/best.pt, found none")
        num_runs = len(runs)
        runs = runs[:1] if options.is_quick else runs
        equal = count = 0
        losses, published_losses = [], []
        for run in runs:
            predictions, published, loss = run_model(clone, run, recordings, options.dtype)
            equal += int((predictions == published).sum())
            count += len(published)
            losses.append(loss)
            published_losses.append(clone.read_json(f"{run}/test_metrics.json", "loss")["loss"])
        all_equal, all_windows = all_equal + equal, all_windows + count
        figures.append(_compare_predictions(f"{title}: predictions of {len(runs)} of {num_runs} models", equal, count))
        theirs, ours = float(np.mean(published_losses)), float(np.mean(losses))
        criterion = "at most 1 % apart"
        figures.append(
            Figure(f"{title}: loss", f"{theirs:.6f}", f"{ours:.6f}", abs(ours - theirs) <= 0.01 * theirs, criterion)
        )
    return [*figures, _compare_predictions("all predictions", all_equal, all_windows)]


def run_model(
    clone: Clone, run: str, recordings: Recordings, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, float]:
    """Return our predictions of a run's test windows, the published ones, and our loss."""
    model, saved = read_model(clone, f"{run}/best.pt")
    if dtype is not None:
        model = model.to(dtype)
    inputs, labels, published = read_test_windows(clone, f"{run}/test_predictions.json", recordings, saved)
    config, num_classes = saved["config"], model.head.out_features
    windows = recordings.windows(config["window_size"], config["stride"])
    weights = class_weights(windows, classify([x.activity for x in windows], num_classes), config, num_classes)
    logits = torch.cat([model(batch.to(model.head.weight.dtype)) for batch in inputs.split(BATCH)]).float()
    batches = zip(logits.split(BATCH), labels.split(BATCH), strict=True)
    total = sum(F.cross_entropy(x, y, weights).item() * len(y) for x, y in batches)
    return logits.argmax(-1), published, total / len(labels)


def _is_run(path: str) -> bool:
    parts = path.split("/")
    return parts[-1] == "best.pt" and parts[-2].startswith("mamba3_") and parts[-3].startswith("seed")


def _compare_predictions(name: str, equal: int, count: int) -> Figure:
    ours = f"{equal:,} of them equal"
    return Figure(name, f"{count:,} classes", ours, equal >= 0.999 * count, "at least 99.9 % equal")


ROW = Row(
    name="motion",
    title="Mamba-3 classifiers of motion data: the GPU's prediction of every test window",
    repository="Madung2/mamba3",
    commit=COMMIT,
    compare=compare,
)
