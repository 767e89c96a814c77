"""Hides credentials in every text that is shown or stored.

Every message of an `Error`, every traceback on the command line and every name of an array goes through
`redacted`. It knows the credentials that were used and those of the environment, and recognizes text that
looks like credentials.

Standard library only.
"""

import datetime
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

HIDDEN = "***"
LEAST = 6
"""Texts with fewer characters are not hidden, because they occur everywhere."""

_known: set[str] = set()
_VARIABLES = re.compile(
    r"^(AWS|AZURE|GOOGLE|GCS|FSSPEC|S3)_.*(KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL|SIGNATURE)", re.IGNORECASE
)
_USER = re.compile(
    r"(?<=://)(?:[^/?#\s@\"'<>]*(?:@[^/?#\s@\"'<>]*)*@"
    # A password with a slash in it, which should have been written %2F.
    r"|[^/?#\s@\"'<>:]*:(?!\d*(?:[/?#\s\"'<>]|$))[^?#\s\"'<>]*@)"
)
_QUERY = re.compile(r"(\w://[^\s?\"'<>]*\?)[^\s\"'<>)#]+")
_FIELDS = re.compile(
    r"((?:Signature|Credential|SecurityToken|AWSAccessKeyId|StringToSign\w*|CanonicalRequest\w*)\W{0,3}[=:>]\s*)"
    r"[\w+/%=.~-]{12,}",
    re.IGNORECASE,
)


_PUBLIC = re.compile(
    r"(aws_|azure_|google_|gcs_|s3_)?"
    r"(bucket|bucket_name|container|container_name|account_name|endpoint|endpoint_url|region|region_name|"
    r"default_region|prefix|path|protocol|profile|project|signature_version|addressing_style|user_agent|"
    r"\w*type|\w*timeout|\w*interval|\w*size|\w*max\w*)",
    re.IGNORECASE,
)
"""Names of store options whose values are not credentials."""
_PLAIN = re.compile(r"true|false|none|[0-9.]{1,5}(ms|s|m|h)?", re.IGNORECASE)
"""Texts that are not credentials, whatever the option is called."""


def secrets_in(options: Any, name: str = "") -> Iterator[Any]:
    """Yield the values of a store's options that may be credentials: all that are not known to be public.

    `options`: names and values; a value may itself hold options. `name`: the name of the option that holds
    `options`.
    """
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from secrets_in(value, str(key))
    elif isinstance(options, list | tuple | set | frozenset):
        for value in options:
            yield from secrets_in(value, name)
    elif isinstance(options, str):
        public = _PUBLIC.fullmatch(name) and redacted(options) == options
        if options and not (public or _PLAIN.fullmatch(options)):
            yield options
    elif not (options is None or isinstance(options, bool | int | float | datetime.timedelta)):
        yield options


def keep_secret(*texts: Any) -> None:
    """Hide these texts from now on. Values that are not text are ignored."""
    for text in texts:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        if isinstance(text, str) and len(text) >= LEAST:
            _known.update((text, quote(text, safe=""), quote(text), unquote(text)))


def keep_secrets_of(url: str) -> None:
    """Hide the userinfo and the query of a URL from now on, but not the container in an address of Azure."""
    if "://" not in url:
        return
    found, query = _USER.search(without_container(url)), url.partition("?")[2]
    user = found[0][:-1] if found else ""
    keep_secret(user, *user.split(":"), query, *(part.partition("=")[2] for part in query.split("&")))


def without_container(url: str) -> str:
    """Return an address of Azure without its container, which stands where other URLs have a user:
    `abfss://container@account.dfs.core.windows.net/path`."""
    return re.sub(r"^(abfss?://)[^:/?#@]*@", r"\1", url)


def url(text: str) -> str:
    """Return a text in which URLs have no userinfo and no query."""
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def redacted(text: str) -> str:
    """Return the text with all credentials hidden."""
    text = _FIELDS.sub(rf"\g<1>{HIDDEN}", url(text))
    given = {value for name, value in os.environ.items() if len(value) >= LEAST and _VARIABLES.match(name)}
    for secret in sorted(_known | given, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
