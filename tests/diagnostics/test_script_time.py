"""The time of `doctor slurm` grows with the script, and no faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
from hostile_inputs import SCRIPTS
from pattern_growth import too_slow

from ckptctl.diagnostics.slurm import _CHECKS, MAX_ADVICE, check_script, read_script
from ckptctl.logs.log_lines import Deadline

N_BYTES = 2_000


def checked(text: str) -> object:
    """Every check, to its end."""
    script = read_script(text)
    return [advice for check in _CHECKS for advice in check(script)]


def scripts(names: list[str]) -> Callable[[int], Iterator[str]]:
    """The same scripts at both lengths, behind a head that asks for a signal."""
    head = "#!/bin/bash\n#SBATCH --signal=B:USR1@60\n"
    return lambda n_bytes: (
        head + SCRIPTS[name](n_bytes).decode("utf-8", "replace") for name in names
    )


def test_a_hostile_script_takes_linear_time():
    assert too_slow(checked, scripts([*SCRIPTS]), N_BYTES) == []


@pytest.mark.parametrize(("ask", "numbered"), [*product(("B:USR1", "USR1"), ("300", "9" * 5000))])
def test_a_signal_with_any_number_is_read(ask, numbered):
    text = f"#!/bin/bash\n#SBATCH --signal={ask}@{numbered}\nsrun python a.py --save-timeout 9\n"
    check_script("job.sh", read_script(text))


def test_a_script_without_a_command_is_read():
    assert check_script("job.sh", read_script("")) != ()


def test_a_script_that_is_not_checked_to_its_end_is_no_sound_one():
    sound = "#!/bin/bash\n#SBATCH --signal=TERM@300\nsrun -K python a.py --resume auto\n"
    script = read_script(sound)
    assert "script.unread" not in {each.name for each in check_script("job.sh", script)}
    late = check_script("job.sh", script, Deadline(limit_s=-1.0))
    assert late[0].name == "script.unread"
    many = read_script("#!/bin/bash\n" + "#SBATCH --nodes=$N\n" * (MAX_ADVICE + 10))
    assert check_script("job.sh", many)[0].name == "script.unread"
