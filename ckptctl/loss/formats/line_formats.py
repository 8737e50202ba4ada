"""The table of programs that print a training step as one line of text.

An entry has the beginning of the line, its names and values, and its end. `console` reads
lines with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_VALUE = r"(\d{1,3}(?:,\d{3}){1,9}(?![\d.])|[^\s,|\]]{1,64})"
_BARS = r"(?<![A-Za-z])([A-Za-z][^|:]{0,99}):\s{0,20}" + _VALUE
_COLONS = r"(?<![\w/])([A-Za-z][\w/]{0,99}):\s{0,20}" + _VALUE
# What is measured beside the training. A host or a file can have such a name as well.
_NOT_TRAINING = r"(?:val|valid\w{0,10}|eval|evaluat\w{0,10}|test|testing)(?:\b(?![-./])|_)"
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
    and the last one counts. `counts`: what the step counts, if no training steps. `models`: one
    process may train several models, such as the folds of a cross-validation. `numbered`: the
    line may begin with the step as with the rank of `srun --label` (`12: `). The group `gain` of
    `head` is a metric that rises to 1; the loss is what it lacks.
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
    counts: str | None = None
    models: bool = False
    numbered: bool = False

    @property
    def has_epochs_above(self) -> bool:
        """Whether a line of its own may name the epoch in which the steps below it are."""
        return self.rounds and self.fallback and not self.redrawn


_FALLING = (
    r"(?:[a-z]+_)?(?:log_?loss|rmse|mse|mae|mape|rmsle|l1|l2|error|cross_entropy|xentropy|deviance"
    r"|poisson|quantile|huber|fair|gamma|tweedie|nloglik)"
)
"""Losses of gradient boosting."""
_RISING = (
    r"(?:auc(?:pr|_mu)?|average_precision|map|ndcg|pre|accuracy|acc|f1|precision|recall|pr_auc)"
)
"""Metrics of gradient boosting that rise to 1."""
_NUMBER = r"[-+]?(?:\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,4})?|nan|inf)"

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
        "modded-nanogpt",
        "train_time:",
        r"\bstep:(?P<step>\d+)/\d+\s+(?=\w+:)",
        _COLONS,
        tail=r"train_time:\S+",
        keys={"step_time_s": "step_avg"},
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
        "torchtune-bar",
        "|Loss: ",
        r"(?:^|(?<=\s))\d{1,9}\|(?P<step>\d{1,12})\|Loss: (?P<loss>[^\s:]{1,64}):",
        redrawn=True,
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
        "pith-train",
        "step ",
        r"\bstep (?P<step>\d+)/\d+ \|",
        r"(?<![a-z-])([a-z][a-z-]{0,60}) ([^\s|]+)",
        tail=r"tokens-per-second \S+",
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
        "basicsr",
        "epoch:",
        r"[<\[]epoch: {0,20}\d{1,9}, iter: {0,20}(?P<step>\d[\d,]{0,15}), "
        r"lr:\(?(?P<lr>[^\s,)>]{1,64})",
        r"\b(l_\w{1,60}): (\S{1,64})",
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
        "tf-estimator",
        ", step = ",
        r"\bloss = (?P<loss>[^\s,]{1,64}), step = (?P<step>\d{1,12})\b",
    ),
    LineFormat(
        "clu",
        "logging_writer.py:",
        # Flax examples, T5X; an evaluation has `eval_loss`.
        r"\blogging_writer\.py:\d{1,6}\] \[(?P<step>\d{1,12})\] "
        r"(?=(?:.{0,1000}[ ,])?(?:train\w{0,20}[_/])?loss=)",
        _EQUALS,
    ),
    LineFormat(
        "flax",
        "Step... (",
        r"\bStep\.\.\. \((?P<step>\d{1,12}) \| (?=Loss: )",
        r"\b(Loss|Learning Rate): ([^\s,)]{1,64})",
    ),
    LineFormat(
        "opennmt",
        "; xent: ",
        r"\bStep (?P<step>\d{1,12})/ {0,20}\d{1,12}; acc: ",
        r"\b([a-z]{1,20}): {1,20}([^\s;]{1,64})",
        keys={"loss": "xent"},
        averages=True,
    ),
    LineFormat(
        "marian",
        " : Cost ",
        r"\bUp\. (?P<step>\d[\d,]{0,15}) : .{0,100}?: Cost (?P<loss>\S{1,64})",
        r"\b(gNorm|L\.r\.) (\S{1,64})",
        averages=True,
    ),
    LineFormat(
        "ultralytics",
        "G ",
        # The epoch, the memory of the GPU, and the mean of the first part of the loss since the
        # epoch began: that of the whole epoch counts.
        r"^\s{0,20}(?P<step>\d{1,9})/\d{1,9}\s{1,20}[\d.]{1,9}G\s{1,20}(?P<loss>[\d.einfa+-]{1,20})\s"
        r"(?=[^|]{0,200}: {0,4}100%)",
        redrawn=True,
        counts="epochs",
    ),
    LineFormat(
        "trlx",
        "[loss",
        r"\[(?=loss\w{0,20}(?:/\w{1,40})?: [^]]{0,400}\]: {0,9}\d{1,3}%\|[^|]{0,99}\| "
        r"{0,9}(?P<step>\d{1,12})/\d{1,12} )",
        r"(?<![\w/])(loss\w{0,20}(?:/\w{1,40})?): ([^\s\]|]{1,40})",
        redrawn=True,
    ),
    LineFormat(
        "rwkv",
        "-",
        r"^(?P<step>\d+) (?P<loss>\S+) \S+ (?P<lr>\d\S*) \d{4}-\d\d-\d\d \d\d:",
        counts="epochs",
    ),
    LineFormat(
        "mlflow-metric",
        " ",
        r"^(?P<at>\d{13}) (?P<loss>\S+) (?P<step>\d+)$",
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
        r"(?:\bEpoch \[?(?P<epoch>\d{1,9})(?:/\d{1,9})?\]?:[^|]{0,20}\|[^|]{0,400})?"
        r"\| *(?P<step>\d{1,12})/(?P<per>\d{1,12}|\?) "
        r"\[[\d:]{1,20}<(?=[^\]]{0,2000}?(?:\b|_)[Ll]oss)",
        r"(?<![\w/])([A-Za-z][\w/]{0,99})=([^\s,\]]+)",
        trimmed=True,
        fallback=True,
        rounds=True,
        redrawn=True,
    ),
    LineFormat(
        "rich-bar",
        "\u2022",
        # Lightning's RichProgressBar, on a terminal.
        r"\bEpoch (?P<epoch>\d{1,9})/-?\d{1,9} +[\u2500-\u257f ]{1,400} "
        r"(?P<step>\d{1,12})/(?P<per>\d{1,12}|--|\?) [-\d:]{1,20} \u2022",
        r"(?<![\w/])([A-Za-z][\w/]{0,99}): (\S+)",
        trimmed=True,
        fallback=True,
        rounds=True,
        redrawn=True,
    ),
    LineFormat(
        "boosting",
        "rain",
        # XGBoost, LightGBM: an iteration, and the metric of each set; that of a cross-validation
        # has a deviation (`+0.01`) and is not of one model. A loss is preferred to a metric.
        r"(?i)^(?:\[[\d:. -]{5,30}\] ?|\[LightGBM\] \[Info\] )?"
        r"(?:\[(?=\d{1,9}\])|Iteration:(?=\d{1,9},))(?P<step>\d{1,9})[\],]"
        r"(?:\s|#011)(?:.{0,500}?(?:\s|#011))??"
        rf"train(?:ing)?(?:'s |[-_ ])(?:{_FALLING}(?:@[\d.]{{1,9}})? ?: ?(?P<loss>{_NUMBER})"
        rf"|(?!.{{0,500}}train(?:ing)?(?:'s |[-_ ]){_FALLING}(?:@[\d.]{{1,9}})? ?:)"
        rf"{_RISING}(?:@[\d.]{{1,9}}-?)? ?: ?(?P<gain>[01](?:\.\d{{1,20}})?))(?=[\s#]|$)",
        fallback=True,
        models=True,
    ),
    LineFormat(
        "rvc",
        ", ",
        # RVC: the step and the learning rate on a line, the parts of the loss on the next one.
        r"(?:^|:)\[(?P<step>\d{1,12}), (?P<lr>\d[^\s\]]{0,60})\](?=$|\s|\w)",
        r"(?<![a-z])(loss_[a-z]{1,20})=([^\s,]{1,40})",
        tail=r"\bloss_mel=\S",
        keys={"loss": "loss_mel"},
    ),
    LineFormat(
        "catboost",
        "learn: ",
        rf"^(?P<step>\d{{1,9}}):\s{{1,9}}learn: (?P<loss>{_NUMBER})(?=\s)",
        models=True,
        numbered=True,
    ),
    LineFormat(
        "darknet",
        " avg",
        # The running mean begins again in each process.
        rf"^\s{{0,9}}(?:\(next [^)]{{1,99}}\) )?(?P<step>\d{{1,12}}): (?P<loss>{_NUMBER}), "
        rf"{_NUMBER} avg(?: loss)?, (?P<lr>{_NUMBER}) rate,",
        numbered=True,
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
        r"(?:tensor\()?'?([-+]?(?:[\d.][\w.+,-]{0,60}[\w%]|\d|nan|inf\w{0,9}))",
        rounds=True,
        fallback=True,
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
        r"([-+]?(?:[\d.][\w.+-]*|nan|inf\w*))",
        rounds=True,
        fallback=True,
    ),
    LineFormat(
        "epochs",
        "oss",
        # A custom loop with a row for each epoch: no other counter, and a loss of training first.
        r"(?i)^(?!.{0,300}?(?:[%\u2500-\u25ff] {0,4}[|\u2022\u2500-\u25ff]|\bbatch(?:es)?\b|"
        r"(?:(?<![\w/])|_)(?:step|iter|iteration|itr?|update)s?\b[ :=#\[('\"]{1,9}\d|"
        r"(?<!epoch)(?<!epoch )(?<!epoch: )\[ *\d{1,12} ?/ *\d{1,12}))"
        rf"(?:(?=.*\btrain\w{{0,20}}[ _/]loss)|(?!(?:(?!loss).){{0,300}}(?:\b|_){_NOT_TRAINING}))"
        r".{0,100}?\bepoch\b[ :=#\[(]{0,4}(?P<step>\d{1,9})(?![\d.]|\s?%)"
        r"(?=\D.{0,300}?(?:\b|_)loss)",
        r"(?i)(?<![\w/])((?:(?:train\w{0,20}|val\w{0,20}|eval\w{0,20}|test|average|avg|mean|total)"
        r" )?"
        r"[a-z][\w/]{0,99}(?: norm| rate)?)['\"]?[ :=]{1,3}"
        r"([-+]?(?:[\d.][\w.+-]{0,60}|nan|inf\w{0,9}))",
        fallback=True,
        counts="epochs",
    ),
)
