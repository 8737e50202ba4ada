"""Recognize a file of saved tensors by its first bytes, whatever its name is.

A program may give its saves any name: `semi_best`, `e3`, `scores.checkpoint_1000`. Each
format of `FORMATS` begins in a way that text, pictures and tables do not.

Source: torch 2.13 `caffe2/serialize/inline_container.cc` and `torch/serialization.py`;
safetensors 0.8 `safetensors/src/tensor.rs`; NumPy 2.3 `lib/_npyio_impl.py` (`savez`); Keras
3.11 `saving/saving_lib.py`; stable-baselines3 2.7 `common/save_util.py`; flax 0.12
`serialization.py`; MXNet 1.9 `src/ndarray/ndarray.cc`; darknet `src/parser.c`; GGUF 3; XGBoost
3.1 `src/c_api/c_api.cc` (UBJSON) and 1.7 (`binf`); CatBoost 1.2 `libs/model/model.cpp`; LightGBM
4.6 `src/boosting/gbdt_model_text.cpp`; Kaldi `util/kaldi-io-inl.h`; JLD2 0.6.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckptctl.formats.archive.safetensors import MAX_HEADER, PREFIX

HEAD_BYTES = 1024
"""So many bytes hold what is compared, among it the first array that a pickle refers to."""

TORCH = "a torch.save file"
SAFETENSORS = "safetensors weights"


class _Format(NamedTuple):
    kind: str
    head: bytes
    """A regular expression that matches the beginning."""
    first_member: str = ""
    """For a zip archive: a regular expression that matches the name of its first member."""


_ZIP = rb"PK\x03\x04"
_NAME_LENGTH, _NAME = slice(26, 28), 30
"""Where the header of a zip member has the length of its name, and where the name begins."""

_ARRAYS = (
    rb"(?:c|\x8c.)(?:numpy[\w.]*[\n\x94].{0,3}_(?:reconstruct|frombuffer)"
    rb"|(?:torch|jax|jaxlib|flax|haiku|optax|paddle|tensorflow|cupy|chainer|mxnet|mlx)[.\w]*[\n\x94])"
)
_STATE = rb"(?:params|state|state_dict|opt_state|model|optimizer|step|target|version)"

FORMATS = (
    _Format(
        TORCH,
        _ZIP,
        r"(?:.*/)?(?:data\.pkl|byteorder|version|constants\.pkl|\.format_version"
        r"|\.storage_alignment)|.+/(?:data/[0-9]+|\.data/.+)",
    ),
    _Format(TORCH, rb"\x80[\x02-\x05](?:\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"),
    _Format("an npz file", _ZIP, r".+\.npy"),
    _Format("a Keras file", _ZIP + rb".{26,40}metadata\.json.*keras_version"),
    _Format("a stable-baselines3 file", _ZIP + rb".*policy_class", "data"),
    _Format(
        "a pickle of arrays", rb"\x80[\x02-\x05](?!.*(?:c|\x8c.)(?:pandas|sklearn)).*" + _ARRAYS
    ),
    _Format(SAFETENSORS, rb".{8}\{ *(?:\"|\})"),
    _Format("an HDF5 file", rb"\x89HDF\r\n\x1a\n"),
    _Format("a msgpack file of flax", rb"[\x81-\x8f][\xa4-\xaa]" + _STATE),
    _Format("MXNet weights", rb"\x12\x01\0{14}"),
    _Format("darknet weights", rb"\0{4}[\x01-\x02]\0{3}[\0-\x09]\0{3}"),
    _Format("a GGUF file", rb"GGUF[\x01-\x09]\0{3}"),
    _Format("an XGBoost model", rb"\{L\0{7}\x07learner|\{ *\"learner\"|binf"),
    _Format("a CatBoost model", rb"CBM1"),
    _Format("a LightGBM model", rb"tree\nversion=v[0-9]"),
    _Format("a Kaldi model", rb"\0B<[A-Z]\w*>"),
    _Format("a JLD2 file", rb"HDF5-based Julia Data Format"),
)


def saved_format(head: bytes, size: int) -> str | None:
    """What a file of `size` bytes is called that begins with `head`; None if nothing proves it.

    `head` has `HEAD_BYTES`, or all bytes of a shorter file.
    """
    length = int.from_bytes(head[_NAME_LENGTH], "little")
    first = head[_NAME : _NAME + length].decode("utf-8", "replace")
    for each in FORMATS:
        if not re.match(each.head, head, re.DOTALL):
            continue
        if each.first_member and not re.fullmatch(each.first_member, first):
            continue
        n_header = int.from_bytes(head[:PREFIX], "little")
        if each.kind == SAFETENSORS and not 2 <= n_header <= min(size - PREFIX, MAX_HEADER):
            continue
        return each.kind
    return None
