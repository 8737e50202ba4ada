"""What a run of RB-7 without a person has to be given on a root of 4 ranks."""

RB_7 = {
    "MENDED": "a power cut ended it",
    "SEEN_BY": "the job has this node only",
    "WORLD_SIZE": "4",
}


def settings(**inputs: object) -> tuple[str, ...]:
    """The options that give these inputs."""
    return tuple(
        word
        for name, value in inputs.items()
        for each in (value if isinstance(value, list) else [value])
        if each is not None
        for word in ("--set", f"{name}={each}")
    )
