"""Checkpoints: models on disk and on the hub, in the formats that people have.

Reading order:

- `formats/`: one adapter per foreign format, which maps its config and its names of tensors to ours;
- `weight_files.py`: safetensors, pickle and GGUF files, every tensor straight from the file in the requested dtype;
- `empty_model.py`: a model without values, and the tensors that a config asks for;
- `open.py`: what a directory, file or hub id holds, checked before anything is read;
- `known.py`: published checkpoints, and what their files leave out;
- `load.py` and `save.py`: from a checkpoint to a model, and back; `hub.py`: files of the hub.

One weight, from file to model: `open_checkpoint` finds the format that recognizes config.json and reads the config,
lists the tensors in the headers of the weight files, and matches them with those that the config asks for, by name,
shape and dtype. `load_model` makes the empty model; `iter_tensors` then reads each tensor from its file, straight into
the dtype, device and weight format of the model, which takes it without a copy.
"""

from anymamba.checkpoints.empty_model import empty_model as empty_model
from anymamba.checkpoints.empty_model import parameter_count as parameter_count
from anymamba.checkpoints.formats import FORMATS as FORMATS
from anymamba.checkpoints.load import load_model as load_model
from anymamba.checkpoints.open import Checkpoint as Checkpoint
from anymamba.checkpoints.open import open_checkpoint as open_checkpoint
from anymamba.checkpoints.open import resolve_source as resolve_source
from anymamba.checkpoints.save import copy_companions as copy_companions
from anymamba.checkpoints.save import push_model as push_model
from anymamba.checkpoints.save import save_model as save_model
