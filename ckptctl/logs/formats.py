"""The table of programs that print a training step as text.

An entry has a literal that each of its lines contains, the beginning of the line, its names and
values, and its end; `console` reads lines with it. Programs that save no checkpoints of several
ranks are left out: `PATTERNS` has what `--pattern` needs for some.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_VALUE = r"(\d{1,3}(?:,\d{3}){1,9}(?![\d.])|[^\s,|\]]{1,64})"
_BARS = r"(?<![A-Za-z])([A-Za-z][^|:]{0,99}):\s{0,20}" + _VALUE
_COLONS = r"(?<![\w/])([A-Za-z][\w/]{0,99}):\s{0,20}" + _VALUE
# What is measured beside the training. A host or a file can have such a name as well.
_NOT_TRAINING = (
    r"(?:val|valid\w{0,10}|eval|evaluat\w{0,10}|test|testing|dev|held-?out)(?:\b(?![-./])|_)"
)
_EQUALS = r"(?<![\w/])([A-Za-z][\w/]{0,99})=" + _VALUE


@dataclass(frozen=True, slots=True)
class LineFormat:
    """How one program prints a step; `head`, `pairs` and `tail` are regular expressions.

    Every line contains `hint`. `head` matches the beginning of the line with the step, in
    the group `step`, or as `it` of `per` iterations of the epoch `epoch`; other groups are
    fields of the row. `pairs` matches names and values after it. `tail` matches in complete
    lines only.

    `averages`: the loss is the mean since the row before. `trimmed`: trailing zeros are
    left out. `fallback`: formats of one program are preferred. `rounds`: steps may start again in
    each `epoch`, or after `per` of them. `redrawn`: a step may be printed several times,
    and the last one counts. `epochs_above`: a line of its own may name the epoch in which the
    steps below it are.
    """

    name: str
    hint: str
    head: str
    pairs: str | None = None
    tail: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    averages: bool = False
    trimmed: bool = False
    fallback: bool = False
    rounds: bool = False
    redrawn: bool = False
    epochs_above: bool = False


LINE_FORMATS = (
    LineFormat(
        "nemo",
        "Training epoch",
        # `iteration` starts again in each epoch.
        r"\bTraining epoch \d{1,9}, iteration \d{1,12}/\d{1,12} \|"
        r"(?=.{0,2000}?\bglobal_step: (?P<step>\d{1,12})\b)",
        _BARS,
        trimmed=True,
    ),
    LineFormat(
        "megatron",
        "iteration",
        r"\biteration\s{1,20}(?P<step>\d{1,12})\s{0,20}/\s{0,20}\d{1,12}\s{0,20}\|",
        _BARS + r"\s{0,20}(?=\|)",
        tail=r"number of (?:nan|skipped) iterations:\s{0,20}\d{1,12}\s{0,20}\|",
        averages=True,
    ),
    LineFormat(
        "nanotron",
        "iteration:",
        r"\biteration:\s{0,20}(?P<step>\d{1,12})\s{0,20}/\s{0,20}\d{1,12}\s{0,20}\|",
        _BARS,
        tail=r"grad_norm:\s*\S+",
        trimmed=True,
    ),
    LineFormat(
        "torchtitan",
        "step:",
        r"(?<!validate )\bstep:\s*(?P<step>\d+)\s+(?=loss:)",
        _COLONS,
        tail=r"mfu:\s*\S+",
        keys={"device_throughput": "tps"},
    ),
    LineFormat(
        "nanogpt",
        "iter ",
        r"\biter\s+(?P<step>\d+):\s+(?=loss)",
        r"(?<![a-z])([a-z]{1,40}):? ([^\s,]+)",
        tail=r"time \S+ms|\blr:? \S",
    ),
    LineFormat(
        "verl",
        "step:",
        # Each number with its path; NumPy's since 2.0 with their type.
        r"\bstep:(?P<step>\d{1,12}) - (?=[\w/-]{1,100}(?:\([^)]{0,20}\))?:)",
        r"(?<![\w/])([A-Za-z][\w/-]{0,99})(?:\([^)]{0,20}\))?:(?:np\.float\d\d\()?([^\s,)]{1,64})",
    ),
    LineFormat(
        "kempnerforge",
        "[step ",
        r"\[step (?P<step>\d+)\]\s+(?=loss=)",
        _EQUALS,
        tail=r"step_time=\S+",
    ),
    LineFormat(
        "maxtext",
        "completed step:",
        r"\bcompleted step: (?P<step>\d+),",
        _COLONS,
        tail=r"\bloss: \S+",
    ),
    LineFormat(
        "levanter",
        "Progress on:train",
        # Above 1,000 steps three digits are printed: the last row of `12.3kit` represents it.
        r"\bProgress on:train\s+(?P<step>\d{1,12}(?:\.\d{1,2})?[kM]?)it/",
        r"(loss)=([^\s,]+)",
        tail=r"postfix:",
        redrawn=True,
    ),
    LineFormat(
        "torchtune",
        "Step ",
        r"\bStep (?P<step>\d+) \|\s*(?=\w+:)",
        _COLONS,
        tail=r"peak_memory\w{0,40}:|tokens_per_second\w{0,40}:.{0,400}\b(?:lr|loss):",
        trimmed=True,
    ),
    LineFormat(
        "litgpt",
        "loss train:",
        r"\biter \d{1,12} step (?P<step>\d{1,12}) \| loss train: (?P<loss>[^\s,]{1,64})",
        redrawn=True,
    ),
    LineFormat(
        "fairseq",
        "num_updates=",
        r"\bepoch \d{1,9}:\s{0,20}\d{1,12} / \d{1,12} .{0,1000}?\bnum_updates=(?P<step>\d{1,12})",
        _EQUALS,
        tail=r"\bwall=\S+",
        averages=True,
        trimmed=True,
    ),
    LineFormat(
        "detectron2",
        "total_loss:",
        r"\biter:\s*(?P<step>\d+)\s+(?=total_loss:)",
        _COLONS,
        tail=r"\blr:\s*\S+",
    ),
    LineFormat(
        "mmengine",
        "Epoch",
        r"\bEpoch(?:\(train\))?\s*\[(?P<epoch>\d+)\]\[\s*(?P<it>\d+)/(?P<per>\d+)\]",
        _COLONS,
        tail=r"\bloss:\s*\S+",
        averages=True,
    ),
    LineFormat(
        "mmengine-iter",
        "Iter",
        r"\bIter(?:\(train\))?\s*\[\s*(?P<step>\d+)/\d+\]",
        _COLONS,
        tail=r"\bloss:\s*\S+",
        averages=True,
    ),
    LineFormat(
        "deepspeed-pipe",
        "steps: ",
        r"\bsteps: (?P<step>\d+) (?=loss:)",
        r"(?<![a-z/])([a-z][a-z/]{0,60}(?: time \(s\))?):\s{0,20}(\S+)",
        tail=r"samples/sec:\s*\S+",
    ),
    LineFormat(
        "mindformers",
        "step:[",
        r"\bEpoch:\[ *(?P<epoch>\d{1,9})/ *\d{1,9}\], "
        r"step:\[ *(?P<step>\d{1,12})/ *(?P<per>\d{1,12})\]",
        r"(?<!\w)([A-Za-z]\w{0,99}): ?\[? {0,20}([^\s,\]/]+)",
        keys={"step_time_s": "per_step_time", "grad_norm": "global_norm"},
        rounds=True,
    ),
    LineFormat(
        "wenet",
        "TRAIN Batch ",
        # The epoch, and the batch of it; validation prints `CV`.
        r"\bTRAIN Batch (?P<epoch>\d{1,9})/(?P<step>\d{1,12}) (?=loss )",
        r"(?<!\w)([a-z]\w{0,99}) (\S+)",
        rounds=True,
    ),
    LineFormat(
        "espnet",
        "epoch:train:",
        r"\b(?P<epoch>\d{1,9})epoch:train:\d{1,12}-(?P<step>\d{1,12})batch: ",
        _EQUALS,
        keys={"lr": "optim0_lr0", "step_time_s": "train_time"},
        averages=True,
        rounds=True,
    ),
    LineFormat(
        "paddlenlp",
        "global_step: ",
        # An evaluation has `eval_loss` and no step.
        r"\bloss: (?P<loss>[^\s,]{1,64}), learning_rate: (?P<lr>[^\s,]{1,64}), "
        r"global_step: (?P<step>\d{1,12})\b",
        averages=True,
        trimmed=True,
    ),
    LineFormat(
        "deepspeed",
        "skipped=",
        r"\bstep=(?P<step>\d+), skipped=\d+, ",
        r"(lr)=\[([^\],]+)",
        fallback=True,
    ),
    LineFormat(
        "progress-bar",
        "oss=",
        # tqdm with a postfix, as in Lightning: a step is printed repeatedly, the last counts.
        rf"^(?![^|]{{0,200}}\b(?i:{_NOT_TRAINING})).{{0,400}}?"
        r"(?:\bEpoch \[?(?P<epoch>\d{1,9})(?:/\d{1,9})?\]?(?: [\[(][^|\])]{1,40}[\])])?:"
        r"[^|]{0,20}\|[^|]{0,400})?"
        r"\| *(?P<step>\d{1,12})/(?P<per>\d{1,12}|\?) "
        r"\[[\d:]{1,20}<(?=[^\]]{0,2000}?(?:\b|_)[Ll]oss)",
        r"(?<![\w/])([A-Za-z][\w/]{0,99})=([^\s,\]]+)",
        trimmed=True,
        fallback=True,
        rounds=True,
        redrawn=True,
    ),
    LineFormat(
        "plain",
        "oss",
        # A custom training loop: a step, and after it a loss.
        r"(?i)^(?:(?=.*\btrain\w{0,20}[ _/]loss)|"
        rf"(?!.*(?:(?:\b|_){_NOT_TRAINING}|\[dev\])))"
        r"(?:.{0,300}?\bepoch\b[ :=#\[(]{0,4}(?P<epoch>\d{1,9}))?"
        # A global step outweighs that of an inner loop.
        r".{0,300}?(?:(?P<whole>\bglobal[ _])|(?<![\w/])|_)"
        r"(?:step|iter|iteration|itr?|update|batch)s?\b[ :=#\[('\"]{1,9}"
        r"(?P<step>\d[\d,]{0,15})(?!\.?\d|\s?%|[kmb]\b)(?:\s?/\s?(?P<per>\d{1,12}))?"
        r"(?(whole)|(?!.{0,300}?\bglobal[ _](?:step|iter)))"
        r"(?=\D.{0,300}?(?:\b|_|last)loss)",
        r"(?i)(?<![\w/])((?:(?:train\w{0,20}|val\w{0,20}|eval\w{0,20}|test) )?"
        r"[a-z][\w/]{0,99}(?: norm| rate| total| mean)?)['\"]?[ :=]{1,3}"
        r"(?:tensor\()?'?([-+]?(?:1\.#[a-z]{3,4}|[\d.][\w.+,-]{0,60}[\w%]|\d|nan|inf\w{0,9}|none\b|null\b))",
        rounds=True,
        fallback=True,
        epochs_above=True,
    ),
    LineFormat(
        "bracketed",
        "oss",
        # `[5/1000] loss=2.34`, and torchvision's `Epoch: [0][ 10/5005] ... Loss 6.9 (7.0)`.
        rf"(?i)^(?!.{{0,200}}\b{_NOT_TRAINING})"
        r"(?:\[[^\]]{1,40}\])?[^\[]{0,200}"
        r"(?:\[ *(?P<epoch>\d{1,9})(?: ?/ *\d{1,9})?\] {0,4})?"
        # `Epoch [1/3]` alone is no step.
        r"(?<!epoch)(?<!epoch )(?<!epoch: )"
        r"\[ *(?P<step>\d{1,12}) ?/ *(?P<per>\d{1,12})(?: \([^)]{0,20}\))?\]"
        r"(?=.{0,1000}(?:\b|_)loss\b)",
        r"(?<![\w/])([A-Za-z][\w/]{0,99})(?: ?[=:] {0,4}| {1,4}|\t)"
        r"([-+]?(?:1\.#[A-Z]{3,4}|[\d.][\w.+-]*|nan|inf\w*|None\b|null\b))",
        rounds=True,
        fallback=True,
        epochs_above=True,
    ),
)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one program prints a step over several lines.

    `head` matches the heading with the step, `metric` a name and a value. With `gaps`, at most so
    many other lines lie between the metrics.
    """

    name: str
    hint: str
    head: re.Pattern[str]
    metric: re.Pattern[str]
    gaps: int = 0


BLOCK_FORMATS = (
    BlockFormat(
        "olmo-core",
        "[step=",
        re.compile(r"\[step=(?P<step>[\d,]{1,16})/(?:[\d,]{1,16}|\?{1,9})"),
        re.compile(r"^\s{1,99}((?!eval)[^\s=][^=]{0,199})=(\S{1,99})\s*$"),
    ),
    BlockFormat(
        "composer",
        "]:",
        re.compile(r"\[(?:batch|ba)=(?P<step>\d{1,12})(?:/\d{1,12})?\]:"),
        re.compile(r"^\s{0,99}(?:\d{1,9}:)?\s{0,99}Train ([^:]{1,199}): (\S+)"),
    ),
    BlockFormat(
        "nemo-rl",
        "==== Step ",
        re.compile(r"={5,99} Step (?P<step>\d{1,12})/\d{1,12} ={5,99}"),
        re.compile(r"^\s{0,9}\u2022 ((?:Policy )?Loss|Total step time): (\S{1,99})"),
        gaps=100,
    ),
)

PATTERNS = (
    # (what a line of the program contains, `--pattern`)
    (r"^\[\d{1,9}\]\s.{0,400}?\btrain", r"^\[(?P<step>\d+)\].*?\btrain[^:]*: ?(?P<loss>\S+)"),
    (r"^\d{1,9}:\s{1,9}learn: ", r"^(?P<step>\d+):\s+learn: (?P<loss>\S+)"),
    (
        r"^\s{0,20}\d{1,9}/\d{1,9}\s{1,20}[\d.]{1,9}G\s",
        r"^ *(?P<step>\d+)/\d+ +[\d.]+G +(?P<loss>\S+)",
    ),
    (r"^\d{1,9}\s{1,9}\d{1,9}\.\d{1,9}\s", r"^(?P<step>\d+)\s+(?P<loss>\S+)"),
    (r"\bloss = \S{1,64}, step = \d", r"\bloss = (?P<loss>\S+), step = (?P<step>\d+)"),
    (
        r"\blogging_writer\.py:\d{1,6}\] \[\d.{0,1000}loss=",
        r"\[(?P<step>\d+)\] .*?loss.(?P<loss>[^\s,]+)",
    ),
    (r"\bStep\.\.\. \(\d", r"Step\.\.\. \((?P<step>\d+) \| Loss: (?P<loss>[^\s,)]+)"),
    (r"; xent: \S", r"Step (?P<step>\d+)/.*?; xent: +(?P<loss>[^\s;]+)"),
    (r"\bUp\. \d.{0,100}: Cost ", r"Up\. (?P<step>[\d,]+) :.*?: Cost (?P<loss>\S+)"),
    (
        r"\biter: {0,20}\d.{0,400}\bl_\w{1,60}: ",
        r"\biter: *(?P<step>[\d,]+), .*?\bl_\w+: (?P<loss>\S+)",
    ),
)
"""For XGBoost and LightGBM, CatBoost, Ultralytics' console, fastai's tables, TensorFlow's
Estimator, CLU, Flax, OpenNMT, Marian and BasicSR."""
