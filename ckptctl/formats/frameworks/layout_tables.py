"""Tables of the names that frameworks give steps, pointers, parts and markers.

Patterns are text, matched against a whole name by `layouts`: `re` compiles those that are
used, and the start of a command pays for no other.

Source: the directory layouts of torchtitan, KempnerForge, OLMo-core,
Megatron-LM and -Bridge, NeMo Automodel, DeepSpeed, Lightning, transformers,
accelerate, Composer, Orbax, nanotron, DLRover, ByteCheckpoint, verl, torchtune.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptctl.formats.frameworks.file_names import OF_DATA
from ckptctl.model import PartFormat

_N = r"(?P<step>[0-9]+)"
_OF_RUN = r"(?:(?P<run>[^/]*?)-)??"

# In this order: the first that matches the whole name decides what it is. A group `run` is what
# the names of one run share; Lightning puts there what each of its callbacks is for.
STEP_NAMES = (
    ("torchtitan", rf"step-{_N}"),
    ("dcp", rf"step_{_N}"),
    ("olmo-core", rf"step{_N}"),
    ("megatron", rf"iter_{_N}"),
    ("automodel", rf"epoch_[0-9]+_step_{_N}"),
    ("lightning", rf"(?:[^/]*[-_])?(?:global_)?step={_N}(?:\.0)?(?:-[^/]*)?\.ckpt"),
    ("lightning-epochs", rf"(?:[^/]*[-_])?epoch={_N}(?:-(?!step=)[^/]*)?\.ckpt"),
    ("nemo", rf"(?:(?P<run>[^/]*?)--)?(?:[^/]*-)?step={_N}(?:-[^/]*)?"),
    (
        "nemo-samples",
        rf"(?:(?P<run>[^/]*?)--)?(?:[^/]*-)?consumed_samples={_N}(?:\.0)?(?:-last)?(?:-v[0-9]+)?",
    ),
    ("transformers", rf"checkpoint-{_N}"),
    ("accelerate", rf"checkpoint_{_N}"),
    ("deepspeed-universal", rf"global_step{_N}_universal"),
    ("deepspeed", rf"global_step{_N}"),
    ("verl", rf"global_step_{_N}"),
    ("composer", rf"{_OF_RUN}(?:ep[0-9]+-)?ba{_N}(?:-rank[0-9]+)?"),
    ("composer-epochs", rf"ep{_N}(?:-rank[0-9]+)?"),
    ("torchtune", rf"(?:dist_)?epoch_{_N}"),
    ("fairseq", rf"checkpoint_[0-9]+_{_N}"),
    ("epochs", rf"(?:(?:(?:ckpt|checkpoint|model)[-_])?epoch[-_]?|checkpoint){_N}"),
    (
        "dcp",
        rf"(?:(?:ckpt|checkpoint|model|state)[-_]step|ckpt|iter|it|iteration)[-_]?{_N}(?:-ckpt)?",
    ),
    ("dcp", rf"step{_N}-unsharded"),
    (
        "dcp",
        rf"(?:(?:ckpt|checkpoint|model|state)[-_])?epoch[-_]?[0-9]+[-_](?:global_)?step[-_]?{_N}",
    ),
    ("dcp", r"model_(?P<step>[0-9]{7})"),  # Detectron2
    ("kohya", r"(?P<run>.+)-step(?P<step>[0-9]{8})-state"),
    ("kohya-epochs", r"(?P<run>.+)-(?P<step>[0-9]{6})-state"),
)

FLAT_NUMBER = r"(?P<step>[0-9]{7})"
"""The name of a step that is one file, without its suffix: `0050000.pt`, as DiT names it."""

_NOT_WHOLE = (
    r"(?!(?:.*[-_.])?(?:best|hpc|optimizer|optim|opt|lr|scheduler|sched|scaler|ema|part|shard|fold"
    rf"|seed|layer|{OF_DATA})(?:[-_.0-9]|$)|loss[-_])"
)
_METRIC = (
    r"[-_](?:[A-Za-z_@/]+=[-+]?[0-9.]+(?:e[-+]?[0-9]+)?"
    r"|(?:[A-Za-z_]+[-_]?)?[-+]?[0-9]+\.[0-9]+(?:e[-+]?[0-9]+)?"
    r"|(?:[a-z]+_)?(?:loss|acc|accuracy|f1|auc|map|m?iou|dice|bleu|[wc]er|ppl|psnr|ssim|fid|reward"
    r"|score)[-_]?[0-9]+)"
)
"""A metric in a name: `-loss=0.25`, `_val_loss_0.25`, `-0.25`, `_acc_93`."""

_BEHIND = rf"(?:[-_](?:ckpt|checkpoint|model|state|weights|full|rank0))?(?:{_METRIC})*"
_PREFIX = r"(?P<run>(?:.+[-_.])?)"
_STEP_WORD = "step|iter|iteration|it|update"

_WHOLE = (
    r"(?:(?:model|checkpoint|ckpt|snapshot|weights|net|net_g|training[-_]state)[-_.]|chkpnt[-_]?)"
)

LONE_NAMES = (
    ("kohya", r"(?P<run>.+)-step(?P<step>[0-9]{8})\.safetensors"),
    ("kohya-epochs", r"(?P<run>.+)-(?P<step>[0-9]{6})\.safetensors"),
    ("ai-toolkit", r"(?P<run>.+)_(?P<step>[0-9]{9})\.safetensors"),
    ("timm", rf"recovery-{_N}-(?P<attempt>[0-9]{{1,9}})\.pth\.tar"),
    ("epochs", rf"rwkv-{_N}\.pth"),
    ("dcp", rf"{_NOT_WHOLE}{_PREFIX}(?:{_STEP_WORD})s?[-_=.]?{_N}{_BEHIND}\.[a-z].*"),
    ("epochs", rf"{_NOT_WHOLE}{_PREFIX}(?:epoch|ep)[-_=.]?{_N}{_BEHIND}\.[a-z].*"),
    ("lone", rf"{_NOT_WHOLE}{_PREFIX}{_WHOLE}{_N}{_BEHIND}\.[a-z].*"),
)
"""Names of files that are steps where a root has no others; beside other steps they are exports.

The weights of sd-scripts and ai-toolkit, timm's recovery files (of an epoch and a batch),
RWKV-LM, torchvision's `model_12.pth`, rsl_rl's `model_1000.pt`, EDM's `training-state-001000.pt`,
3D Gaussian Splatting's `chkpnt7000.pth`, YOLOX's `epoch_12_ckpt.pth`, and custom loops.
"""

COUNTED_NAME = (
    r"(?!.*(?:rank|size|node|gpu|worker))"
    rf"{_NOT_WHOLE}{_PREFIX}(?<![0-9]\.){_N}{_BEHIND}\.(?:pt|pth|ckpt|pth\.tar)"
)
"""Names of files with a number that nothing explains, `12.pt`: steps if they count that number."""

LABELLED = rf"(?i)(?:{_STEP_WORD}|epoch|ep)s?[-_=.]?[0-9]"
"""A number that a word calls that of a step or epoch, so that it is not that of a shard."""

SAME_RUN = (
    rf"(?i)(?:^|[-_.])(?:epoch|ep)[-_=.]?[0-9]+|{_METRIC}|(?:^|[-_.])(?:last|latest|final|backup"
    r"|emergency|preempt(?:ed)?|interrupt(?:ed)?|exit|model|checkpoint|ckpt|snapshot|weights|net"
    r"|state|train(?:ing)?|full|saved?)(?=[-_.]|$)"
)
"""What differs in the names of one run, in front of the number of a step."""

EPOCH_BEFORE = r"(?:^|[-_.])(?:epoch|ep)[-_=.]?(?P<epoch>[0-9]{1,6})[-_.]"
"""The epoch in a name that has a step too, which may be counted from the begin of the epoch."""

KIND_BESIDE = (
    r"(?i)(?:^|(?<=[-_.]))(?:model|net|network|weights|params|module|optimizer|optim|opt"
    r"|(?:lr_)?(?:scheduler|sched)|(?:grad_)?scaler|ema|generator|gen|g|discriminator|disc|dis|d"
    r"|encoder|decoder|actor|critic|policy|value|state|trainer|training|checkpoint|ckpt"
    r"|rank[-_]?[0-9]{1,6})(?:[-_.]|(?=[0-9])|$)"
)
"""What names a kind of file among those of one step side by side in the root."""

NAME_BESIDE = (
    r"(?!.*best)(?P<run>(?:.*[-_.])??)"
    rf"(?:(?P<epochs>epoch|ep)|(?:{_STEP_WORD})s?)?[-_=.]?{_N}[-_.]?"
)
"""A name without what names the kind, and without the suffix."""

COUNTS_OF_OTHER_THINGS: Mapping[str, str] = {
    "accelerate": "saves",
    "torchtune": "epochs",
    "lightning-epochs": "epochs",
    "composer-epochs": "epochs",
    "epochs": "epochs",
    "kohya-epochs": "epochs",
    "timm": "epochs",
    "nemo-samples": "samples",
    "by-kind-epochs": "epochs",
    "lone": "saves",
    "ray-train": "reports",
}
"""The layouts whose number is not the training step, and what it counts.

Source: accelerate 1.15 `accelerator.py` (`save_iteration`); torchtune names a folder by its epoch,
as do Lightning, Composer, fairseq and DINO where a file name has no step.
"""

# Steps that have no folder: their files lie in several, or beside those of other steps. Those of
# NVRx are the first.
SCATTERED = (
    ("nvrx", rf"(?:[^/]+/)?r?[0-9]{{1,6}}/iter_{_N}_[0-9]{{1,6}}_local(?:\.dirty)?\.pt"),
    ("composer-ranks", rf"{_OF_RUN}(?:ep[0-9]+-)?ba{_N}-rank[0-9]{{1,6}}\.pt"),
    # fairseq and metaseq
    (
        "fairseq-shards",
        rf"checkpoint_(?:[0-9]+_)?{_N}(?:-model_part-[0-9]{{1,6}})?-shard[0-9]{{1,6}}\.pt",
    ),
    # DINOv2, nanochat, guided-diffusion, VITS
    ("by-kind", r"model_(?P<step>[0-9]{7})\.rank_[0-9]{1,6}\.pth"),
    ("by-kind", r"(?:model|optim|meta)_(?P<step>[0-9]{6})(?:_rank[0-9]{1,6})?\.(?:pt|json)"),
    ("by-kind", r"(?:model|opt|ema_[0-9.]+_)(?P<step>[0-9]{6})\.pt"),
    ("by-kind", rf"[GD]_{_N}\.pth"),
    ("by-kind", r"(?:g|do)_(?P<step>[0-9]{8})"),  # HiFi-GAN
    ("basicsr", rf"models/net_[a-z]+_{_N}\.pth"),
    ("basicsr", rf"training_states/{_N}\.state"),
)

HOLDS_SCATTERED = r"r?[0-9]{1,6}"
"""Folders of NVRx, one for each rank."""

BARE_NUMBER = _N

LIGHTNING = ("lightning", "lightning-epochs")
WITH_VERSIONS = (*LIGHTNING, "nemo", "nemo-samples")
LIGHTNING_VERSION = r".*-v([1-9][0-9]{0,8})(?:\.ckpt)?"
"""Lightning's name for a further save of the same step: `step=200.ckpt`, `step=200-v1.ckpt`."""

UNFINISHED = (
    r"tmp[-_](?P<after>.+)"
    r"|(?P<before>.+?)(?:[-_.](?:tmp|temp|partial|incomplete|inprogress|unfinished)"
    r"|\.orbax-checkpoint-tmp.*)"
)

OF_ATTEMPT = r"(?P<rest>.+)\.attempt-(?P<attempt>[1-9][0-9]{0,9})"

UNFINISHED_MARKERS = r"\.incomplete|.+-unfinished|(?:.*/)?[^/]+_local\.dirty\.pt"

UNFINISHED_BESIDE = "-unfinished"

TRACKER = "latest_train_state.pt"

POINTERS: Mapping[str, str] = {
    "latest": "a link or a name",
    "LATEST": "a link or a name",
    "LATEST.txt": "a name",
    "latest.txt": "a number or a name",
    "latest_checkpointed_iteration.txt": "a number",
    "dlrover_latest.txt": "a number",
    "last.ckpt": "a link",
    "last": "a link",
    "last_checkpoint": "a name",
    "latest_universal": "a name",
}

RANK_POINTER = r"latest-rank[0-9]+(?:\.pt)?(?:\.symlink)?"

SHARD = r"__(?P<rank>[0-9]+)_[0-9]+\.distcp"

HUGGING_FACE_SHARD = r"shard-(?P<number>[0-9]{1,9})-[^/]*\.safetensors"

RANK_LOCAL = r"__(?P<rank>[0-9]+)\.metadata"

MODEL_FOLDERS = ("model", "weights")

TAG = r"(?P<folder>(?:.*/)?)latest"
"""DeepSpeed's file in a step of transformers or Lightning: it names the folder that is loaded."""

TORCH_INDEX = r"(?P<folder>(?:.*/)?)[^/]+\.bin\.index\.json"
"""The index of a model in several files of `torch.save`."""

TORCH_SHARD = r"(?P<model>(?:.*/)?pytorch_(?:model|optim))-[0-9]{5}(?:-of-[0-9]{5})?\.bin"
"""A file of such a model, as transformers and ColossalAI name it; both write an index."""

LEFT_BY_TOOLS = (
    r"(?:.*/)?(?:"
    r"(?:\.[^/]+|__MACOSX|@eaDir|lost\+found)/.+"
    r"|\._.+|\.nfs.+|\.fuse_hidden.+|\.[^/]+\.(?=[^/]*[A-Z])[A-Za-z0-9]{6}"
    r"|\.ckptctl-[0-9a-f]{16}\.tmp|\.DS_Store|Thumbs\.db|desktop\.ini|[^/]* \([0-9]+\)\.[^/.]+)"
)
"""Files in a step that no framework writes: hidden folders, among them those of rsync
(`.~tmp~`) and of snapshots, its temporary files (`.model.pt.aB3xY9`; a capital letter, which 96 %
of them have, tells them from `.x.distcp` and `.x.sha256`), what NFS and FUSE keep of a removed
file that is open, what file managers add to each folder, second downloads (`model (1).pt`), and
what ckptctl was writing when it was killed."""

# By the full path below the step; the first row that matches any file decides.
OTHER_FORMATS = (
    (PartFormat.PADDLE, r"(?:.*/)?[^/]+\.pd(?:params|opt|states)"),
    (PartFormat.UNKNOWN, r"CKPT\.yaml"),  # SpeechBrain: not all of its `.ckpt` are of `torch.save`
    (PartFormat.TORCHSNAPSHOT, r"\.snapshot_metadata"),
    (PartFormat.ORBAX, r"(?:.*/)?(?:_CHECKPOINT_METADATA|commit_success\.txt|manifest\.ocdbt)"),
    (PartFormat.ZARR, r".*(?:/|^)(?:\.zarray|\.zgroup|zarr\.json)"),
)

ARCHIVE = (
    r"(?:.*/)?[^/]+(?<!\.dirty)\.(?:pt|pth|ckpt|pth\.tar)"
    r"|training_states/[0-9]+\.state|(?:g|do)_[0-9]{8}"
)
"""Files of `torch.save`, by a suffix that nothing else has, and those of BasicSR and HiFi-GAN."""

PERHAPS_ARCHIVE = r"(?:.*/)?[^/]+\.(?:bin|pkl|tar)"
"""Files that are those of `torch.save` where their name states that they hold train state."""

OF_ONE_STEP = r"\.metadata|metadata\.pkl|__[0-9]+(?:_[0-9]+\.distcp|\.metadata)|" + "|".join(
    form for kind, form in OTHER_FORMATS if kind is PartFormat.UNKNOWN
)
"""Files directly in a step, and never directly in a root."""

SIGNATURES = (
    # layout, layouts by name that it may refine, a file that only it writes
    ("olmo-core", "olmo-core", r"model_and_optim/.+|train/rank[0-9]+\.pt|\.metadata\.json"),
    ("lightning", "torchtitan dcp", r"meta\.pt"),
    ("megatron-bridge", "megatron", r"run_config\.yaml|train_state\.pt"),
    (
        "transformers",
        "transformers",
        r"trainer_state\.json|rng_state(?:_[0-9]+)?\.pth|training_args\.bin",
    ),
    ("accelerate", "accelerate transformers dcp torchtune epochs", r"random_states_[0-9]+\.pkl"),
    ("transformers", "transformers", r".*_fsdp_[0-9]+/.+|optimizer\.(?:pt|bin)"),
    (
        "deepspeed",
        "dcp torchtitan olmo-core megatron transformers accelerate verl",
        r"(?:zero_pp_rank_[0-9]+_)?mp_rank_[0-9]+_model_states\.pt",
    ),
    ("accelerate", "accelerate", r"(?:pytorch_model_fsdp|optimizer)_[0-9]+/.+"),
    ("kempnerforge", "dcp", r"train_state\.pt"),
    ("automodel", "automodel", r"(?:model|optim)/.+|step_scheduler\.pt|\.incomplete"),
    ("bytecheckpoint", "verl", r"(?:extra_state|loader_ckpt|loader)/.+"),
    ("nanotron", "dcp", r"checkpoint_metadata\.json|random/tp-[0-9]+-of-.+\.pt"),
    ("lerobot", "dcp", r"training_state/(?:training_step\.json|rng_state\.safetensors)"),
)

# Names that others use too: without the signature they are plain DCP.
NEEDS_SIGNATURE = frozenset({"olmo-core", "transformers", "accelerate", "automodel"})

WRITTEN_LAST: Mapping[str, tuple[str, ...]] = {
    "olmo-core": (".metadata.json", "train/rank0.pt"),
    **dict.fromkeys(LIGHTNING, ("meta.pt",)),
    "transformers": ("trainer_state.json",),
    "accelerate": ("random_states_0.pkl",),
    "megatron-bridge": ("train_state.pt", "run_config.yaml"),
    "nanotron": ("checkpoint_metadata.json",),
    "lerobot": (
        "training_state/training_step.json",
        "training_state/rng_state.safetensors",
        "pretrained_model/train_config.json",
    ),
}

STATES_RANKS = r"(?:.*/)?training_args\.bin"
"""A file of transformers that no load reads, and that states how many ranks there were.

Source: transformers 5.23 `trainer.py` (`_save`), accelerate 1.15 `state.py` (`PartialState`).
"""

PARSED: Mapping[str, tuple[str, ...]] = {"transformers": ("config.json", "adapter_config.json")}
"""Documents that a load need not find, and does not survive where they are no JSON.

Source: transformers 5.23 `trainer.py` (`_load_from_checkpoint`); PEFT `PeftConfig`.
"""

_TORCH_DIST = (r"common\.pt", "metadata.json")

NEEDED_BESIDE: Mapping[str, tuple[str, str]] = {
    "megatron": _TORCH_DIST,
    "megatron-bridge": _TORCH_DIST,
    "nanotron": (r"optimizer/optimizer_pp-.+\.pt", "optimizer/optimizer_config.json"),
    "lerobot": (
        r"training_state/optimizer_state\.safetensors",
        "training_state/optimizer_param_groups.json",
    ),
}
"""Documents without which no load works where a file is there: how that file is named, and theirs.

Megatron's `metadata.json` states that the folder is a torch_dist checkpoint.
"""

STAGE = r"pp(?P<stage>[0-9]{1,6})"
