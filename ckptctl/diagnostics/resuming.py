"""Whether a training command resumes, as far as its text shows.

Frameworks resume by an option, by themselves (from the newest save in their output folder), or by
a setting in a configuration file, which a job script does not show. Only a command that has none
of these and names neither a configuration nor arguments from elsewhere starts at step 0.

Sources: the training entry points of torchtitan 0.2, transformers 4.57 (`examples/pytorch`,
`get_last_checkpoint`), verl 0.6 (`trainer.resume_mode=auto`), fairseq 0.12
(`--restore-file checkpoint_last.pt`), MaxText (orbax in its run folder), nanotron
(`checkpoints.resume_checkpoint_path`), NeMo (`exp_manager.resume_if_exists`), Megatron Bridge,
axolotl (`auto_resume_from_checkpoints`), LLaMA-Factory, llm-foundry and Composer (`autoresume`),
torchtune, OLMo-core, InternEvo, Lightning.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple


class Resumption(Enum):
    """Whether a command resumes."""

    SHOWN = "an option or the framework resumes"
    UNKNOWN = "the script does not show it"
    ABSENT = "nothing resumes"


class _Framework(NamedTuple):
    """A framework by its command; `condition` shows that it resumes by itself in this command.

    Without a condition its configuration decides. `setting` is where it does.
    """

    name: str
    command: re.Pattern[str]
    setting: str
    condition: re.Pattern[str] | None = None


_ALWAYS = re.compile("")


def _framework(name: str, command: str, setting: str, condition: str | None = None) -> _Framework:
    shown = None if condition is None else re.compile(condition) if condition else _ALWAYS
    return _Framework(name, re.compile(command), setting, shown)


_FRAMEWORKS = (
    _framework(
        "torchtitan",
        r"\btorchtitan[./]|\brun_train\.sh\b",
        "`checkpoint.enable`",
        r"--checkpoint\.enable(?:_checkpoint)?\b(?![= ](?:false|False|0))",
    ),
    _framework("verl", r"\bverl\.trainer\b", "`trainer.resume_mode`", ""),
    _framework("fairseq", r"\bfairseq(?:-train|-hydra-train|_cli)\b", "`--restore-file`", ""),
    _framework("MaxText", r"\b(?i:maxtext)[./]\w+", "`enable_checkpointing`", ""),
    _framework(
        "the example scripts of transformers",
        r"\brun_(?:clm|mlm|plm|glue|ner|qa|summarization|translation|seq2seq_qa|speech_\w+|mae|mim)"
        r"(?:_no_trainer|_fim)?\.py\b",
        "`--output_dir`",
        r"^(?!.*--overwrite_output_dir)",
    ),
    _framework("nanotron", r"\bnanotron\b", "`checkpoints.resume_checkpoint_path`"),
    _framework(
        "NeMo", r"\bnemo\b|megatron_\w+_(?:pretraining|finetuning)\.py", "`resume_if_exists`"
    ),
    _framework("Megatron Bridge", r"\bmegatron[./]bridge\b", "`checkpoint.load`"),
    _framework("axolotl", r"\baxolotl\b", "`auto_resume_from_checkpoints`"),
    _framework("LLaMA-Factory", r"\bllamafactory", "`resume_from_checkpoint`"),
    _framework("Composer", r"\b(?:composer|llm-?foundry)\b", "`autoresume`"),
    _framework("torchtune", r"\btune\s+run\b", "`resume_from_checkpoint`"),
    _framework("OLMo", r"\bolmo(?:_core)?\b|OLMo", "`load_path`"),
    _framework("InternEvo", r"\bintern(?:evo|lm)\b", "`auto_resume`"),
    _framework("Colossal-AI", r"\bcolossalai\b", "its configuration"),
    _framework("submitit", r"\bsubmitit\b", "the function that it calls"),
    _framework("Lightning", r"\b(?:lightning|litgpt)\s+\w+", "`ckpt_path`"),
)
_OPTION = re.compile(
    r"resume|ckptctl|\brestore|--load\b|load[-_](?:dir|path|step|checkpoint)|ckpt[-_.]?(?:path|step)|"
    r"from[-_.]?(?:checkpoint|ckpt|latest)|init[-_]from|auto[-_]?restart",
    re.IGNORECASE,
)
_CONFIGURED = re.compile(
    r"--(?:config|cfg|conf|recipe|params?)(?:[-_.]?(?:file|path|name|dir))?\b|"
    r"\S\.(?:ya?ml|toml|json|gin|cfg|ini)\b",
    re.IGNORECASE,
)
# Arguments that the line does not show: all of the script, an array, a variable of its own.
_ELSEWHERE = re.compile(
    r"\"?\$(?:@|\*|\{\w+\[[@*]\]\}|\{?\w*(?:ARGS?|OPTS?|OPTIONS|FLAGS|EXTRA|CMD)\w*)", re.IGNORECASE
)


def has_option(text: str) -> bool:
    """Whether a command names a checkpoint to resume from."""
    return _OPTION.search(text) is not None


def resumption_of(text: str) -> tuple[Resumption, str]:
    """Whether a training command resumes, and what decides it if the text does not show it."""
    if has_option(text):
        return Resumption.SHOWN, ""
    for framework in _FRAMEWORKS:
        if framework.command.search(text):
            if framework.condition is not None and framework.condition.search(text):
                return Resumption.SHOWN, ""
            return Resumption.UNKNOWN, f"{framework.name} decides it by {framework.setting}"
    if _CONFIGURED.search(text):
        return Resumption.UNKNOWN, "its configuration file may decide it"
    if _ELSEWHERE.search(text):
        return Resumption.UNKNOWN, "its arguments come from a variable"
    return Resumption.ABSENT, ""
