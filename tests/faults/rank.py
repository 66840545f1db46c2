"""One rank of a run, as a program: `python -m tests.faults.rank SETTINGS`, SETTINGS as JSON."""

from __future__ import annotations

import json
import os
import sys

import torch

from tests.faults.training import Settings, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Settings(**json.loads(sys.argv[1])), int(os.environ["WORLD_SIZE"]))
