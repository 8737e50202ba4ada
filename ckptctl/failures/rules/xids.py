"""What does each NVIDIA Xid say about who failed?

Source: NVIDIA's Xid catalog (docs.nvidia.com/deploy/xid-errors), the columns for the
immediate action: RESTART_BM and RESET_GPU are the node's, RESTART_APP of the user-mode
errors the program's. 45 and 43 follow from another.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.failures.evidence import Role, Rule

_NODE = {
    46: "the GPU stopped processing",
    48: "a double-bit ECC error in GPU memory",
    54: "an auxiliary power cable of the GPU is missing",
    56: "the display engine failed",
    60: "the video processor failed",
    61: "the GPU's microcontroller stopped",
    62: "the GPU's microcontroller halted",
    64: "a memory row could not be remapped",
    79: "the GPU has fallen off the bus",
    81: "the VGA subsystem failed",
    88: "the GPU's memory could not be tested",
    95: "an uncontained memory error",
    96: "the GPU's decoder failed",
    109: "a context switch of the GPU timed out",
    110: "the security engine of the GPU failed",
    113: "the power supply of the GPU failed",
    119: "the GPU's system processor (GSP) did not answer",
    120: "the GPU's system processor (GSP) failed",
    122: "the GPU's SPI flash could not be read",
    123: "the GPU's power manager failed",
    125: "the GPU's info ROM is corrupt",
    136: "the GPU's link trainer failed",
    140: "an ECC error that could not be recovered",
    143: "the GPU could not be initialised",
    151: "a key rotation of the GPU failed",
    156: "a resource of the GPU was retired",
    157: "a resource of the GPU could not be retired",
    158: "the GPU met a fatal timeout",
    160: "a channel of GPU memory could not be repaired",
    161: "a channel of GPU memory was repaired; a reset is due",
    166: "the C2C link failed",
    167: "the PCIe link to the GPU had a fatal error",
    170: "an interrupt of the GPU failed",
    171: "an uncorrectable error in GPU memory (DRAM)",
    172: "an uncorrectable error in GPU memory (SRAM)",
}
_FABRIC = {
    74: "an NVLink error",
    137: "a fault on an NVLink access",
    **dict.fromkeys(range(144, 151), "an NVLink error"),
    155: "NVLink was brought down by software",
    159: "NVLink failed on the chip-to-chip link",
}
_CODE = {
    13: "an exception of the graphics engine, mostly an access out of bounds",
    31: "a page fault of the GPU's memory unit, mostly an illegal address in the program",
    32: "an invalid or corrupted push buffer",
    69: "an exception of the graphics engine's class",
    80: "corrupted data was sent to the GPU",
}
_SUSPECTS = {
    8: "the GPU stopped processing",
    **dict.fromkeys((39, 40, 41), "the copy engine failed"),
    68: "the video decoder failed",
    71: "the copy engine failed",
    94: "a contained memory error",
}
_REMARKS = {
    37: "the driver firmware reported an error",
    38: "the driver firmware reported an error",
    42: "the video processor reported an error",
    43: "the GPU stopped processing for this program",
    63: "a memory row was remapped",
    92: "a high rate of single-bit ECC errors",
    93: "an info ROM was written to more often than it should be",
    154: "the recovery action of the GPU changed",
    168: "errors of the GPU's write-protected region",
}

_NEEDLES = ("xid",)
_FORMS = (
    r"^(?:NVRM: )?(?:GPU at \S+ )?Xid ?(?:error)? ?\((?P<device>[0-9A-Za-z:. -]+)\) ?[:,] ?",
    r"^NVRM: Xid (?P<device_2>[0-9a-f:.]+): ",
    r"XidCriticalError: Xid=",
)
_DEMANDS = r".*\b(?:GPU Reset Required|Node Reboot Required|Drain and Reset|Drain P2P)"


def _rules() -> Iterator[Rule]:
    # 154 names its own action, which overrides what the number alone would say.
    yield _rule(154, "infra-node", Role.CAUSE, "the GPU needs a reset or a reboot", _DEMANDS)
    for table, failure, role in (
        (_NODE, "infra-node", Role.CAUSE),
        (_FABRIC, "infra-fabric", Role.CAUSE),
        (_CODE, "job-code", Role.ROOT),
        (_SUSPECTS, "infra-node", Role.ROOT),
        (_REMARKS, "infra-node", Role.REMARK),
        ({45: "the channels of a program were torn down"}, "infra-node", Role.CASCADE),
    ):
        for number, says in table.items():
            yield _rule(number, failure, role, says)
    # A number that is in no table: the driver says that something happened, and not what.
    yield _rule(None, "infra-node", Role.SUSPECT, "an Xid that this version does not know")


def _rule(number: int | None, failure: str, role: Role, says: str, more: str = "") -> Rule:
    digits = r"\d+" if number is None else str(number)
    name = "other" if number is None else f"{number}{'.demand' if more else ''}"
    # NVIDIA says of these: restart once, have it replaced when it comes again.
    on_repeat = number in _SUSPECTS
    return Rule(
        f"xid.{name}",
        failure,
        role,
        _NEEDLES,
        tuple(rf"{form}{digits}\b{more}" for form in _FORMS),
        f"{'Xid' if number is None else f'Xid {number}'}: {says}",
        level=20,
        kernel=True,
        action="resume" if on_repeat else "",
        restart="once" if on_repeat else "",
    )


RULES = tuple(_rules())
