"""Keep secrets out of every text that leaves the process.

Two kinds of secrets are hidden, each by a list of what is harmless; what is on no list is
shown as `***`.

- Values that this process received: storage options, variables of the clients of storages, keys,
  arguments of commands that others run. `hide` and its relatives take them in at the edge, and
  `redacted` replaces them wherever they appear, also encoded.
- User names, passwords, signatures and other parameters in addresses, whoever wrote them.

`redacted` is applied where text leaves: by `cli.output`, by the exceptions of the package, by
what is sent, and by records. `shell_command` writes a command that is printed for a person: an
argument that holds a secret becomes a reference to a variable of the shell.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

HIDDEN = "***"
"""What is shown in the place of a secret."""

_HARMLESS_STORAGE_OPTIONS = frozenset(
    {
        # of ckptctl
        *("client", "retry_for_s", "endpoint_url", "endpoint", "region", "region_name"),
        # fsspec and s3fs
        *("anon", "use_ssl", "verify", "requester_pays", "version_aware", "cache_regions"),
        *("default_block_size", "default_cache_type", "default_fill_cache", "fixed_upload_size"),
        *("max_concurrency", "use_listings_cache", "skip_instance_cache", "asynchronous"),
        *("listings_expiry_time", "max_paths", "profile", "profile_name"),
        # botocore's Config, and the names of nested options
        *("client_kwargs", "config_kwargs", "s3", "addressing_style", "signature_version"),
        *("connect_timeout", "read_timeout", "timeout", "retries", "max_attempts", "mode"),
        *("total_max_attempts", "max_pool_connections", "tcp_keepalive", "service_name"),
        *("api_version", "payload_signing_enabled", "use_accelerate_endpoint"),
        *("use_dualstack_endpoint", "use_fips_endpoint", "us_east_1_regional_endpoint"),
        *("request_checksum_calculation", "response_checksum_validation"),
        # obstore
        *("aws_region", "aws_endpoint", "allow_http", "virtual_hosted_style_request"),
        *("skip_signature", "unsigned_payload", "checksum_algorithm", "imdsv1_fallback"),
        *("conditional_put", "copy_if_not_exists"),
        # gcsfs, adlfs, HTTP
        *("project", "access", "consistency", "cache_timeout", "requests_timeout"),
        *("default_location", "account_name", "account_host", "container_name", "location_mode"),
        *("blocksize", "block_size", "simple_links", "same_scheme", "size_policy", "encoded"),
        *("cache_dir", "host", "port"),
    }
)
"""Options of storage clients whose values are shown. Sources: s3fs 2026.2, botocore 1.42
`Config`, obstore 0.9 `S3Config`, gcsfs, adlfs and fsspec's HTTP, their constructors."""

_STORAGE_VARIABLES = (
    *("AWS_", "AZURE_", "GOOGLE_", "GCS_", "GCLOUD_", "CLOUDSDK_", "FSSPEC_", "OSS_", "MINIO_"),
    *("ABFS_", "HF_", "CKPTCTL_"),
)
"""Beginnings of the variables that ckptctl and the clients of storages read."""

_HARMLESS_VARIABLES = frozenset(
    {
        *("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_DEFAULT_PROFILE"),
        *("AWS_DEFAULT_OUTPUT", "AWS_ROLE_SESSION_NAME", "AWS_ROLE_ARN", "AWS_RETRY_MODE"),
        *("AWS_EXECUTION_ENV", "AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_MAX_ATTEMPTS"),
        *("AWS_RESPONSE_CHECKSUM_VALIDATION", "AWS_SDK_LOAD_CONFIG", "AWS_EC2_METADATA_DISABLED"),
        *("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_CLOUD_NAME"),
        *("GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"),
        *("CLOUDSDK_CORE_ACCOUNT", "HF_HOME", "HF_HUB_OFFLINE", "FSSPEC_CONFIG_DIR"),
        # of the supervisor and the runbook
        *("CKPTCTL_ATTEMPT", "CKPTCTL_RUN", "CKPTCTL_PYTHON", "CKPTCTL_ARCHIVE"),
    }
)

_OF_NO_OPTION = frozenset(
    {
        *("CKPTCTL_SEAL_KEY", "CKPTCTL_SIGN_PASSWORD"),
        *("CKPTCTL_HEARTBEAT_KEY", "CKPTCTL_HEARTBEATS"),
        *("CKPTCTL_SUPERVISED", "CKPTCTL_COLLECTS"),
    }
)
"""Variables of ckptctl that set no option. To ask whether one does imports every command."""

_HARMLESS_PARAMETERS = frozenset(
    {
        *("versionid", "x-amz-algorithm", "x-amz-signedheaders", "x-id", "list-type", "prefix"),
        *("delimiter", "max-keys", "encoding-type", "uploads", "uploadid", "partnumber"),
        *("location", "versions", "generation", "alt", "x-goog-algorithm", "x-goog-signedheaders"),
        *("restype", "comp"),
    }
)
"""Parameters in the query of an address that are shown, in lower case."""

_NAMED_BEFORE_HOST = frozenset(
    {"abfs", "abfss", "wasb", "wasbs", "az", "hdfs", "ssh", "sftp", "ftp", "smb"}
)
"""Schemes in which a container or a user stands before `@`; what follows a colon is a password."""

_OF_COMMANDS = frozenset({"--exclude-command", "--launcher", "--notify"})
"""Options whose values are commands."""

SECRET_OPTIONS = _OF_COMMANDS | {"--storage-option", "--set"}
"""Options of ckptctl whose values may hold secrets. Every other value is shown, unless a text that
is known to be a secret is in it."""

_HARMLESS_FLAGS = frozenset(
    {
        *("--account", "--chdir", "--cluster", "--config", "--constraint", "--container"),
        *("--context", "--cpus-per-task", "--exclude", "--gpus", "--host", "--hostfile"),
        *("--jobid", "--mem", "--namespace", "--nodelist", "--nodes", "--ntasks", "--partition"),
        *("--qos", "--reservation", "--time", "-N", "-c", "-n", "-w", "-x"),
        *("--nproc-per-node", "--nproc_per_node", "--nnodes", "--rdzv-backend", "-m"),
    }
)
"""Options of launchers (srun, kubectl, mpirun, torchrun) whose values are shown."""

_MOST_PLAIN = 12
_NAME = rf"[a-z]{{1,{_MOST_PLAIN}}}[0-9]{{0,6}}(?:[-._:,][a-z0-9]{{1,{_MOST_PLAIN}}})*"
"""A word of a language, a program or a machine; a secret that looks so is not recognized."""
_NUMBER = r"-?[0-9][0-9.,:]{0,19}[A-Za-z%]{0,3}"
_FLAG = r"--?[A-Za-z][A-Za-z0-9_-]*"
_PATH = (
    r"(?:~|\.{1,2}|\$\{?[A-Za-z_]\w*\}?)?/[^\0]*|"
    r"[^\s/:=@]+\.(?:py|sh|ya?ml|toml|json|log|txt|sbatch|md)"
)
_FILLED_IN = r"[^{}]*\{[a-z_]*\}[^{}]*|\$\{?[A-Za-z_][A-Za-z0-9_]*\}?|--|[-{};&|<>]{1,2}"

_LEAST = 6
"""A secret that is shorter is not looked for in text: it would be found in every number."""
_LEAST_WORD = 8
_WHOLE_WORD = 16
"""A shorter secret is replaced where it is a word of its own: it may be part of many."""

_ADDRESS = r"([A-Za-z][A-Za-z0-9+.\-]*)://([^\s\"'<>`]*[^\s\"'<>`.,:;)\]}])"
_ENCODED = r"(?i)[A-Za-z][A-Za-z0-9+.\-]*%3A%2F%2F[^\s\"'<>`&]+"
_QUERY = (
    r"(?<=[^\s?])\?([A-Za-z][\w.~%-]{0,63}=[^\s\"'<>`]*[^\s\"'<>`.,:;)\]}]|"
    r"[A-Za-z][\w.~%-]{0,63}=)"
)
_STEP = r"[0-9]{1,19}|latest|auto"
_PORT = r"(?:[^:\[\]]*|\[[^\]]*\])(?::[0-9]*)?"
_SEPARATORS = r"[\s;&,]+"

_values: dict[str, None] = {}
_kept: list[str] = []
_pattern: re.Pattern[str] | None = None
_is_current = True


def is_harmless_option(key: str, value: object) -> bool:
    """Whether a storage option is shown: its key is known, and so is every key in its value."""
    if isinstance(value, bool) or value is None:
        return True
    if isinstance(value, Mapping):
        known = key.lower() in _HARMLESS_STORAGE_OPTIONS or not value
        return known and all(is_harmless_option(str(name), each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(is_harmless_option(key, each) for each in value)
    known = key.lower() in _HARMLESS_STORAGE_OPTIONS
    return known and clean_addresses(str(value)) == str(value)


def hide(value: object) -> None:
    """Hide a value, and what it consists of, in every text from now on."""
    if isinstance(value, Mapping):
        for each in value.values():
            hide(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            hide(each)
        if len(value) == 2 and all(isinstance(each, str) for each in value):
            _add(_in_base64(f"{value[0]}:{value[1]}"))  # as basic authentication sends it
    elif isinstance(value, bytes):
        hide(os.fsdecode(value))
    elif value is not None and not isinstance(value, bool):
        text = str(value)
        _add(text)
        for part in re.split(_SEPARATORS, text):
            name, equals, rest = part.lstrip("?").partition("=")
            if equals and name.lower() not in _HARMLESS_PARAMETERS:
                _add_part(rest)
                _add_part(_unquoted(rest))
            _add_part(part)


def hide_options(options: Mapping[str, object]) -> None:
    """Hide the values of storage options whose keys are not known to be harmless."""
    for key, value in options.items():
        if isinstance(value, Mapping) and key.lower() in _HARMLESS_STORAGE_OPTIONS:
            hide_options({str(name): each for name, each in value.items()})
        elif not is_harmless_option(key, value):
            hide(value)
        if isinstance(value, str):
            hide_address(value)


def hide_address(url: str) -> None:
    """Hide the user name, the password and the parameters of an address."""
    if "://" not in url or (found := re.match(_ADDRESS, url)) is None:
        return
    scheme, rest = found[1].lower(), found[2]
    userinfo, host = _userinfo(scheme, rest)
    if userinfo:
        name, colon, password = userinfo.partition(":")
        named = scheme in _NAMED_BEFORE_HOST
        for each in (password if colon else "", "" if named else name):
            hide(each)
            hide(_unquoted(each))
        _add(_in_base64(_unquoted(userinfo)))
    for pair in re.split("[&;]", host.partition("?")[2].partition("#")[0]):
        name, _, value = pair.partition("=")
        if name.lower() not in _HARMLESS_PARAMETERS:
            _add_part(value)
            _add_part(_unquoted(value))


def hide_environment(environment: Mapping[str, str], is_option: Callable[[str], bool]) -> None:
    """Hide the values of the variables for storages and of ckptctl that are not harmless.

    `is_option` states whether a variable of ckptctl sets an option.
    """
    for name, value in environment.items():
        if name.startswith(_STORAGE_VARIABLES) and name not in _HARMLESS_VARIABLES and value:
            _hide_variable(name, value, is_option)
        elif "://" in value and name.upper().endswith("_PROXY"):
            hide_address(value)


def _hide_variable(name: str, value: str, is_option: Callable[[str], bool]) -> None:
    if "://" in value:
        hide_address(value)
    if name == "CKPTCTL_STORAGE_OPTION":
        for pair in value.split():
            hide_storage_option(pair)
    elif name == "CKPTCTL_SET":
        return
    elif name in ("CKPTCTL_LAUNCHER", "CKPTCTL_EXCLUDE_COMMAND"):
        hide_words(value.split())
    elif _is_plain(value) or re.fullmatch(_ADDRESS, value) is not None:
        return
    elif name in _OF_NO_OPTION or not (name.startswith("CKPTCTL_") and is_option(name)):
        hide(value)


def hide_storage_option(pair: str) -> None:
    """Hide the value of an option `KEY=VALUE`, as a command line has it."""
    key, equals, text = pair.partition("=")
    if not (equals and key.isidentifier()):  # it may be a secret whose key was forgotten
        if key.lower() not in _HARMLESS_STORAGE_OPTIONS:
            hide(pair)
            hide(key)
        return
    if not _is_harmless_text(key, text):
        hide(text)
        for part in re.findall(r'"((?:[^"\\]|\\.)*)"', text):
            _add_part(part)
    hide_address(text)


def hide_words(words: Sequence[str]) -> None:
    """Hide the arguments of a command of others that may be secrets.

    A word that looks like a name stays: it may be a machine or a model that answers name.
    """
    for word, harmless in zip(words, _harmless_words(words), strict=True):
        hide_address(word)
        if not harmless:
            for each in {word, word.partition("=")[2], word.partition(":")[2].strip()}:
                if len(each) >= _LEAST_WORD and not _is_plain(each):
                    hide(each)


def hide_arguments(argv: Sequence[str], is_option: Callable[[str], bool]) -> None:
    """Hide what the arguments of ckptctl contain, before they are understood.

    The value of what is no option, by `is_option`, may be a secret that was mistyped.
    """
    own = argv[: argv.index("--")] if "--" in argv else argv
    hide_words(argv[len(own) + 1 :])
    for option, value in _options_in(own):
        if option == "--storage-option":
            hide_storage_option(value)
        elif option == "--set":  # a runbook knows which of its inputs are commands
            hide_address(value.partition("=")[2])
        elif option in _OF_COMMANDS or (option and not is_option(option)):
            hide_words(words_of(value))
            if option not in _OF_COMMANDS and not _is_plain(value):
                hide(value)
        else:
            hide_address(value)


def keep(*texts: str) -> None:
    """Show these paths although a short secret may be part of them: a root named as a key."""
    _kept.extend(texts)
    _forget_pattern()


def forget() -> None:
    """Forget all that was hidden; for tests, which run many commands in one process."""
    _values.clear()
    _kept.clear()
    _forget_pattern()


def redacted(text: str) -> str:
    """The text without secrets: received values, and those in addresses.

    Cost: one search for each of the known values, all at once; two more where the text holds
    an address.
    """
    pattern = _pattern if _is_current else _compiled()
    if pattern is not None:
        text = pattern.sub(HIDDEN, text)
    return clean_addresses(text)


def redacted_values(value: Any) -> Any:
    """A document with `redacted` applied to each text in it; keys and numbers stay."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: redacted_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(redacted_values, value))
    return value


def shell_command(words: Iterable[str]) -> str:
    """The words of a command of ckptctl, quoted for a shell, with a variable for each secret.

    `--storage-option secret=hunter2` becomes `--storage-option secret="$CKPTCTL_STORAGE_SECRET"`.
    """
    return " ".join(_for_shell([*words]))


def _for_shell(words: Sequence[str]) -> Iterator[str]:
    at = words.index("--") if "--" in words else len(words)
    option = ""
    for word in words[:at]:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if equals:
                yield f"{option}={_value(option, value)}"
                option = ""
            else:
                yield shlex.quote(word)
            continue
        yield _value(option, word)
        option = ""
    behind = words[at + 1 :]
    yield from ("--",) if at < len(words) else ()
    for number, (word, harmless) in enumerate(zip(behind, _harmless_words(behind), strict=True), 1):
        yield shlex.quote(word) if harmless else _reference(f"WORD_{number}")


def _value(option: str, value: str) -> str:
    key, equals, text = value.partition("=")
    name = option.strip("-") or ("ADDRESS" if "://" in value else "VALUE")
    if option == "--storage-option" and equals:
        if _is_harmless_text(key, text):
            return shlex.quote(value)
        return f"{shlex.quote(key)}={_reference(f'STORAGE_{key}')}"
    if option == "--set" and equals:
        placeholder = key.rpartition("_")[2]  # `NEW_LOG=LOG`: to be filled in by a person
        words = [word for word in words_of(text) if word != placeholder]
        if all(_harmless_words(words)) and redacted(text) == text:
            return shlex.quote(value)
        return f"{shlex.quote(key)}={_reference(f'SET_{key}')}"
    harmless = option not in SECRET_OPTIONS or all(_harmless_words(words_of(value)))
    return shlex.quote(value) if harmless and redacted(value) == value else _reference(name)


def command_of_others(words: Sequence[str]) -> str:
    """The words of a command that is not ckptctl's, quoted for a shell, without secrets."""
    return shell_command(["--", *words]).removeprefix("-- ")


def _reference(name: str) -> str:
    return '"$CKPTCTL_' + re.sub("[^A-Za-z0-9]+", "_", name).upper() + '"'


def _options_in(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    option = ""
    for word in argv:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            if equals:
                yield option, value
                option = ""
        else:
            yield option, word
            option = ""


def words_of(command: str) -> list[str]:
    """The words of a command, as far as a shell could read them."""
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def _harmless_words(words: Sequence[str]) -> list[bool]:
    """Whether each word of a command of others is known to be harmless."""
    found = []
    before = ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (re.fullmatch(_FLAG, name) or name.isidentifier()):
            harmless = name in _HARMLESS_FLAGS or _is_known(value)
        elif re.fullmatch(_FLAG, before) and before not in _HARMLESS_FLAGS:
            harmless = _is_known(word)
        else:
            harmless = _is_plain(word)
        found.append(harmless and redacted(word) == word)
        before = word
    return found


def _is_known(word: str) -> bool:
    """Whether a word is a number, an option, a path or a placeholder."""
    forms = (_NUMBER, _FLAG, _PATH, _FILLED_IN)
    return not word or any(re.fullmatch(form, word) for form in forms)


def _is_plain(word: str) -> bool:
    return _is_known(word) or re.fullmatch(_NAME, word) is not None


def _is_harmless_text(key: str, text: str) -> bool:
    """Whether the value of a storage option is shown as a command line has it: JSON or text."""
    if text in ("true", "false", "null"):
        return True
    if text.lstrip().startswith(("{", "[")):
        names = re.findall(r'"((?:[^"\\]|\\.)*)"\s*:', text)
        return all(is_harmless_option(name, "") for name in (key, *names)) and (
            clean_addresses(text) == text
        )
    return is_harmless_option(key, text)


def _add(text: str) -> None:
    if len(text) >= _LEAST and text not in _values and text.lower() not in _WORDS:
        _values[text] = None
        _forget_pattern()


_WORDS = frozenset(
    {
        *("true", "false", "null", "none", "auto", "default", "standard", "legacy", "ckptctl"),
        *("error", "next", "warning", "root", "step"),
    }
)
"""Values that are no secrets: settings, and words that every answer has."""


def _add_part(text: str) -> None:
    if len(text) >= _LEAST_WORD and not _is_plain(text):
        _add(text)


def _forget_pattern() -> None:
    global _is_current  # noqa: PLW0603 - what was received is known to the whole process
    _is_current = False


def _compiled() -> re.Pattern[str] | None:
    global _pattern, _is_current  # noqa: PLW0603
    kept = "\n".join(clean_addresses(each) for each in _kept)
    forms: dict[str, str] = {}
    for value in _values:
        if len(value) < _WHOLE_WORD and value in kept:
            continue
        for form in _forms(value):
            is_word = len(value) < _WHOLE_WORD
            ends = (r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])") if is_word else ("", "")
            forms[form] = f"{ends[0]}{re.escape(form)}{ends[1]}"
    longest_first = sorted(forms, key=len, reverse=True)
    _pattern = re.compile("|".join(forms[each] for each in longest_first)) if forms else None
    _is_current = True
    return _pattern


def _forms(value: str) -> Iterator[str]:
    """The value as it is, and as addresses, JSON, Python, HTML and shells write it."""
    yield value
    if value.isalnum() and value.isascii():
        yield from (_in_base64(value),) if len(value) >= _LEAST_WORD else ()
        return
    for safe in ("-._~", "-._~/", "-._~+", "-._~/=:+"):
        quoted = _quoted(value, safe)
        yield quoted
        yield re.sub("%[0-9A-F]{2}", lambda each: each[0].lower(), quoted)
        yield _quoted(quoted, "-._~")  # an address within an address
    yield _quoted(value, "-._~ ").replace(" ", "+")
    yield value.encode("ascii", "backslashreplace").decode()
    yield value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    yield repr(value)[1:-1]
    yield value.replace("'", "'\"'\"'")
    escaped = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    yield escaped
    yield escaped.replace('"', "&quot;").replace("'", "&#x27;")
    yield escaped.replace('"', "&#34;").replace("'", "&#39;")
    yield _in_base64(value)


def _in_base64(text: str) -> str:
    import binascii

    return binascii.b2a_base64(text.encode("utf-8", "surrogateescape"), newline=False).decode()


def _quoted(text: str, safe: str) -> str:
    from urllib.parse import quote

    return quote(text, safe, errors="surrogateescape")


def _unquoted(text: str) -> str:
    if "%" not in text:
        return text
    from urllib.parse import unquote

    return unquote(text)


def clean_addresses(text: str) -> str:
    """The text without user names, passwords and parameters in addresses."""
    if "://" in text:
        text = re.sub(_ADDRESS, lambda found: _clean(found[1], found[2]), text)
    if "?" in text:
        text = re.sub(_QUERY, lambda found: f"?{_clean_query(found[1])}", text)
    if "%2F%2F" in text or "%2f%2f" in text:
        text = re.sub(_ENCODED, _clean_encoded, text)
    return text


def _clean(scheme: str, rest: str) -> str:
    userinfo, rest = _userinfo(scheme.lower(), rest)
    if userinfo:
        name, colon, _ = userinfo.partition(":")
        if scheme.lower() not in _NAMED_BEFORE_HOST:
            userinfo = HIDDEN
        elif colon:
            userinfo = f"{name}:{HIDDEN}"
        userinfo += "@"
    path, mark, query = rest.partition("?")
    path, hash_, fragment = path.partition("#")
    if mark:
        query, hash_, fragment = query.partition("#")
    on_web = scheme.lower() in ("http", "https")
    if mark:
        query = _clean_query(query, hides_bare=on_web)
    if hash_ and on_web and not re.fullmatch(_NAME, fragment):
        fragment = HIDDEN if fragment else ""
    parts = (path, mark, query, hash_, fragment) if mark else (path, hash_, fragment)
    return f"{scheme}://{userinfo}{''.join(parts)}"


def _userinfo(scheme: str, rest: str) -> tuple[str, str]:
    """What stands before `@` in front of a host, and the rest of the address."""
    if scheme == "github":  # ORGANIZATION:REPOSITORY@BRANCH
        return "", rest
    at = re.search(r"[/?#]", rest)
    authority = rest[: at.start()] if at else rest
    userinfo, found, host = authority.rpartition("@")
    if not found and not re.fullmatch(_PORT, authority):  # a password with a slash in it
        userinfo, found, host = rest.rpartition("@")
        return (userinfo, host) if found else ("", rest)
    is_step = ":" not in userinfo and scheme in ("s3", "s3a", "gs", "gcs", "memory")
    if not found or (is_step and re.fullmatch(_STEP, host)):
        return "", rest
    return userinfo, rest[len(userinfo) + 1 :]


def _clean_query(query: str, *, hides_bare: bool = True) -> str:
    query, hash_, fragment = query.partition("#")
    pieces = re.split("([&;])", query)
    for at in range(0, len(pieces), 2):
        name, equals, value = pieces[at].partition("=")
        if value and name.lower() not in _HARMLESS_PARAMETERS:
            pieces[at] = f"{name}={HIDDEN}"
        elif not equals and name and hides_bare and name.lower() not in _HARMLESS_PARAMETERS:
            pieces[at] = HIDDEN
    return "".join(pieces) + hash_ + fragment


def _clean_encoded(found: re.Match[str]) -> str:
    plain = _unquoted(found[0])
    clean = clean_addresses(plain)
    return found[0] if clean == plain else _quoted(clean, "-._~*")


class RedactedStream:
    """Standard error, to which also libraries, warnings and `logging` write, without secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without secrets; returns how much of it was taken."""
        self._stream.write(redacted(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
