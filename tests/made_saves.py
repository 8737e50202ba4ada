"""Files as training loops write them, with `torch.save`, safetensors and JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

LONG_AGO_S = 1_700_000_000


def weights(step: int) -> dict[str, Any]:
    return {"layers.0.weight": torch.full((8, 8), float(step)), "norm.weight": torch.ones(8)}


def optimizer(step: int) -> dict[str, Any]:
    return {"state": {0: {"exp_avg": torch.full((8, 8), step / 7)}}, "param_groups": [{"lr": 0.1}]}


def whole(step: int) -> dict[str, Any]:
    return {"model": weights(step), "optimizer": optimizer(step), "iteration": step}


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(value))
    elif path.suffix == ".safetensors":
        safetensors.save_file(value, path)
    else:
        torch.save(value, path)
    os.utime(path, (LONG_AGO_S, LONG_AGO_S))
