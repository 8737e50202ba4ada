"""The rules of `classify`: generated from TOML, unique, and each with patterns that compile."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest

from ckptctl.failures.classes import CLASSES
from ckptctl.failures.rules import RULES, Rule

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_the_generated_rules_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = runpy.run_path(str(REPOSITORY / "tools" / "failure_rules.py"))
    monkeypatch.setattr("sys.argv", ["failure_rules.py", "--check"])
    assert tool["main"]() == 0


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name}-{rule.role.value}")
def test_a_rule_names_a_class_and_compiles(rule: Rule) -> None:
    assert rule.failure in CLASSES or rule.failure == "unknown"
    assert rule.literals
    assert all(literal == literal.lower() for literal in rule.literals)
    assert rule.pattern.groups >= 0


def test_no_two_rules_of_one_name_have_the_same_role() -> None:
    counted = Counter((rule.name, rule.role) for rule in RULES)
    assert [name for name, n in counted.items() if n > 1] == []
