"""What must not be shown: credentials, in whatever text they turn up.

Every message of an `Error`, every traceback on the command line and every name of an array goes through
`redacted`. It knows the credentials that were used, those of the environment, and what looks like some.

Standard library only.
"""

import os
import re
from urllib.parse import quote, unquote, urlsplit

HIDDEN = "***"
LEAST = 6
"""Shorter texts are not replaced: they would turn up everywhere."""

_known: set[str] = set()
_VARIABLES = re.compile(
    r"^(AWS|AZURE|GOOGLE|GCS|FSSPEC|S3)_.*(KEY|SECRET|TOKEN|PASSWORD|SAS|CREDENTIAL|SIGNATURE)", re.IGNORECASE
)
_USER = re.compile(r"(?<=://)[^/?#\s@\"'<>]*(?:@[^/?#\s@\"'<>]*)*@")
_QUERY = re.compile(r"(\w://[^\s?\"'<>]*\?)[^\s\"'<>)#]+")
_FIELDS = re.compile(
    r"((?:Signature|Credential|SecurityToken|AWSAccessKeyId|StringToSign\w*|CanonicalRequest\w*)\W{0,3}[=:>]\s*)"
    r"[\w+/%=.~-]{12,}",
    re.IGNORECASE,
)


def keep_secret(*texts: str | None) -> None:
    """From now on these are hidden."""
    for text in texts:
        if text and len(text) >= LEAST:
            _known.update((text, quote(text, safe=""), quote(text), unquote(text)))


def keep_secrets_of(url: str) -> None:
    """The userinfo and the query of a URL are secrets."""
    if "://" not in url:
        return
    head, _, query = url.partition("?")
    user = urlsplit(head).netloc.rpartition("@")[0]
    keep_secret(user, *user.split(":"), query, *(part.partition("=")[2] for part in query.split("&")))


def url(text: str) -> str:
    """A URL as it may be shown: without userinfo and query."""
    return _QUERY.sub(rf"\g<1>{HIDDEN}", _USER.sub(f"{HIDDEN}@", text))


def redacted(text: str) -> str:
    """The text without credentials."""
    text = _FIELDS.sub(rf"\g<1>{HIDDEN}", url(text))
    given = {value for name, value in os.environ.items() if len(value) >= LEAST and _VARIABLES.match(name)}
    for secret in sorted(_known | given, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
