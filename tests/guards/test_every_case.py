"""A test of many cases fails with each case that fails, and with no other."""

from __future__ import annotations

import pytest
from every_case import all_cases


def test_each_case_that_fails_is_shown_and_none_hides_another():
    tried = []

    def try_all():
        with all_cases() as case:
            for n in (1, 2, 3):
                with case(f"case {n}"):
                    tried.append(n)
                    assert n == 2, f"not two but {n}"

    with pytest.raises(pytest.fail.Exception) as raised:
        try_all()
    assert tried == [1, 2, 3]
    shown = str(raised.value)
    assert "case 1:" in shown
    assert "not two but 1" in shown
    assert "case 2:" not in shown
    assert "not two but 3" in shown


def test_a_test_whose_cases_all_pass_passes():
    with all_cases() as case, case("only"):
        pass
