"""What is said when the numbers of a training go wrong?

A single NaN that the loop skips is no failure: what loops say when they give up is.
"""

from __future__ import annotations

from ckptctl.failures.evidence import Role, Rule

RULES = (
    Rule(
        "divergence.gave-up",
        "job-divergence",
        Role.ROOT,
        (
            "nan",
            "inf",
            "diverge",
            "spik",
            "non-finite",
            "nonfinite",
            "not finite",
            "loss scale already",
            "minimum loss scale",
            "unexpected result",
        ),
        (
            (
                r"(?:Error|Exception|[Aa]ssert\w*|[Aa]bort\w*|[Ss]topping|[Ss]topped|[Ee]xit\w*|"
                r"[Tt]erminat\w*|FATAL|[Hh]alt\w*|[Ff]ailed)\b.*\b(?:loss|grad\w*|norm|logits?|"
                r"activations?|weights?|params?|values?)\b.*\b(?:NaN|nan|Inf|inf(?:inity)?|"
                r"non-?finite|not finite|diverg\w+)\b"
            ),
            (
                r"(?:Error|Exception|[Aa]bort\w*|[Ss]topping|[Ss]topped|[Ee]xiting|[Tt]erminating|"
                r"FATAL|[Hh]alting)\b.*\b(?:NaN|nan|Inf|non-?finite|diverg\w+)\b.*\b(?:loss|grad\w*|"
                r"norm|logits?|training)\b"
            ),
            (
                "(?:found NaN in (?:local )?(?:forward|"
                "backward|grad|loss)|Unexpected result (?:nan|"
                r"inf|-inf) \(message=|(?:NaN|Inf) (?:loss "
                r")?(?:detected|found|encountered) (?:in|on|"
                "at|for) .*(?:[Aa]bort|[Ss]top|[Ee]xit|[Rr]ais|[Tt]erminat))"
            ),
            "[Cc]urrent loss scale already at minimum",
            "FloatingPointError: (?:Minimum loss scale|.*(?:NaN|nan|overflow|gradients are))",
            r"Function '\w+' returned nan values in its \d+th output",
            "[Tt]raining (?:has )?diverged",
            "[Ll]oss (?:has )?(?:diverged|exploded)",
            (
                r"\b(?:loss|grad(?:ient)?(?: norm)?) (?:is|"
                r"became|was|has become) (?:nan|NaN|inf|Inf|"
                r"non-finite)\b.*(?:[Ss]top|[Aa]bort|[Ee]xit|[Rr]ais|[Tt]erminat|giv)"
            ),
            (
                r"(?:\d+|[Tt]oo many|[Mm]ax\w*) consecutive (?:NaN|nan|Inf|inf|non-?finite|bad|"
                r"skipped)\b.*(?:limit|stop|abort|exceed|reached|rais|roll|\(max)"
            ),
        ),
        "the loop gave up on NaN, infinity or divergence",
    ),
    Rule(
        "divergence.loss",
        "job-divergence",
        Role.SUSPECT,
        (
            "nan",
            "inf",
        ),
        (
            r"\b(?:lm[ _])?loss\b['\x22]?\s*[:=|]?\s*(?:is |became )?[-+]?(?:NaN|nan|inf)\b",
            (
                "(?:NaN|Inf|non-?finite) (?:loss|gradients?|"
                "grad norm) (?:detected|found|encountered|"
                "at (?:step|iter))"
            ),
            "(?:NaN|nan) (?:or|/) ?(?:Inf|inf) (?:found|detected) in",
            r"grad(?:ient)?[ _]norm\b['\x22]?\s*[:=|]?\s*(?:nan|inf)\b",
        ),
        "the loss or a gradient is not a number",
        level=20,
    ),
)
