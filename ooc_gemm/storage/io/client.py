"""Clients of object stores: s3://, gs://, az:// and http(s)://. The only importer of botocore.

obstore retries what fails for a while (5xx, connections that break or stall) with exponential back-off and
jitter. Credentials come from the environment and the usual files, as botocore finds them.
"""

import datetime
import os
import re
from base64 import b64encode
from collections.abc import Iterator
from functools import lru_cache
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

from ...support import redact
from ...support.errors import InputError
from .requests import MOST_REQUESTS

AZURE = ("az", "adl", "azure", "abfs", "abfss")
"""Schemes of addresses in Azure."""
SCHEMES = ("s3", "s3a", "gs", *AZURE, "http", "https")
"""Schemes of the addresses that obstore understands."""
ENDPOINTS = dict.fromkeys(SCHEMES, ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT")) | {
    "gs": ("GOOGLE_BASE_URL",),
    **dict.fromkeys(("s3", "s3a"), ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")),
}
"""Environment variables with the address of a store that is not the provider's own, by scheme."""
EMULATED = "devstoreaccount1"
"""The account of every emulator of Azure's storage."""
VARIABLES = ("AWS", "AZURE", "GOOGLE", "SSL", "HTTP", "HTTPS")
"""Prefixes of the environment variables that clients read."""


def speaks(url: str) -> bool:
    """Whether obstore understands an address."""
    return urlsplit(url).scheme in SCHEMES


def normal(url: str) -> str:
    """Return an address in one spelling, which ends with a slash."""
    scheme, _, rest = url.partition("://")
    return f"{'s3' if scheme == 's3a' else scheme}://" + re.sub("/+", "/", rest.rstrip("/") + "/")


def address(store: Any) -> str:
    """Return the address that obstore's store stands for; empty where it is in doubt."""
    schemes = {"S3Store": "s3", "GCSStore": "gs"}
    scheme = schemes.get(type(store).__name__)
    return f"{scheme}://{store.config['bucket']}/{store.prefix or ''}" if scheme else ""


def shown(store: Any) -> str:
    """Return how messages call a store of obstore. One in Azure whose account the environment names cannot
    spell itself."""
    if type(store).__name__ == "AzureStore":
        return f"az://{store.config['container_name']}/{store.prefix or ''}".rstrip("/")
    return f"object_store://{store}"


def connect(url: str, seconds: float) -> tuple[Any, str]:
    """Return obstore's store for a URL, and the path in it. `seconds`: for how long a request may be retried.
    Raises InputError, and ImportError where a package is not installed."""
    redact.keep_secrets_of(url)
    address = urlsplit(url)
    web = address.scheme in ("http", "https")
    if not web and (("@" in address.netloc and not address.scheme.startswith("abfs")) or address.query):
        raise InputError(
            f"{redact.url(url)}: credentials do not belong in this address; give them in the environment "
            "or in the usual files, such as ~/.aws/credentials"
        )
    name, path = redact.url(url), ""
    if address.scheme in ("s3", "s3a", "gs"):  # one client, and its connections, for all of a bucket
        url, path = f"{address.scheme}://{address.netloc}", address.path.strip("/")
    where = (one for one in os.environ.items() if one[0] == "HOME" or one[0].partition("_")[0] in VARIABLES)
    try:
        with _connecting:
            return _client(url, seconds, tuple(sorted(where))), path
    except InputError as error:
        raise InputError(f"{name} {error}") from error.__cause__


_connecting = Lock()
"""Lock that lets threads which connect at the same time share one client."""


@lru_cache(16)
def _client(url: str, seconds: float, environment: tuple[tuple[str, str], ...]) -> Any:
    """Make the client of a store for one environment, which takes 30 to 80 ms."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise ImportError("obstore; pip install 'ooc-gemm[remote]'") from error
    address = urlsplit(url)
    client: dict[str, Any] = {
        "connect_timeout": datetime.timedelta(seconds=min(10, seconds / 4)),
        "read_timeout": datetime.timedelta(seconds=seconds / 3),
        "timeout": datetime.timedelta(seconds=600),
        "pool_max_idle_per_host": str(MOST_REQUESTS),
    }
    retry = {
        "max_retries": 10,
        "retry_timeout": datetime.timedelta(seconds=0.75 * seconds),
        "backoff": {
            "init_backoff": datetime.timedelta(milliseconds=100),
            "max_backoff": datetime.timedelta(seconds=min(5, seconds / 8)),
            "base": 2,
        },
    }
    options: dict[str, Any] = {}
    if address.scheme in ("s3", "s3a"):
        options = _aws()
    elif address.scheme in AZURE and "@" not in address.netloc:
        options = _azure(dict(environment))
    if "http" in (address.scheme, *_schemes(address.scheme, environment, options.get("endpoint"))):
        client["allow_http"] = True
    if address.scheme in ("http", "https") and "@" in address.netloc:  # which obstore leaves out
        user, _, host = address.netloc.rpartition("@")
        word = b64encode(unquote(user).encode()).decode()
        redact.keep_secret(word)
        client["default_headers"] = {"Authorization": f"Basic {word}"}
        url = address._replace(netloc=host).geturl()
    options |= {"client_options": client, "retry_config": retry}
    try:
        return from_url(url, **options)
    except Exception as error:
        if "Account must be specified" not in str(error):
            raise
        raise InputError(
            "needs the name of its storage account; set AZURE_STORAGE_ACCOUNT_NAME and "
            "AZURE_STORAGE_ACCOUNT_KEY, or AZURE_SKIP_SIGNATURE=true for a public container"
        ) from error


def _schemes(kind: str, environment: tuple[tuple[str, str], ...], configured: str | None) -> set[str]:
    """Return the schemes of the addresses at which stores of a kind (`s3`) are found. configured: the one of
    the usual files. Raises InputError, where the client would panic, for what is no address."""
    found = [(name, value) for name, value in environment if name in ENDPOINTS.get(kind, ())]
    found += [("the endpoint_url of ~/.aws/config", configured)] if configured else []
    for name, value in found:
        if urlsplit(value).scheme not in ("http", "https"):
            raise InputError(
                f"cannot be reached: {name} is {redact.url(value)!r}, and addresses begin with http:// or "
                "https://; correct it, or leave it out"
            )
    return {urlsplit(value).scheme for _, value in found}


def _azure(environment: dict[str, str]) -> dict[str, Any]:
    """Return the account that the environment names. obstore finds it there, too, but cannot spell such a
    store, and zarr 3.4 asks for that whenever an array is opened."""
    account = environment.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    if not account and environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in (
        "1",
        "true",
        "yes",
        "on",
    ):
        account = EMULATED
    return {"account_name": account} if account else {}


def _aws() -> dict[str, Any]:
    """Return credentials, region and endpoint from the environment and ~/.aws. Raises InputError without the
    name of what was asked for."""
    try:
        import botocore.configprovider
        import botocore.session
    except ImportError as error:
        raise ImportError("botocore; pip install 'ooc-gemm[remote]'") from error
    try:
        session = botocore.session.get_session()
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
        endpoint = botocore.configprovider.ConfiguredEndpointProvider(
            session.full_config, session.get_scoped_config(), "s3"
        ).provide()
        unsigned = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on")
        found = None if unsigned else session.get_credentials()
    except Exception as error:  # a profile that is not there, a file that cannot be parsed
        said = " ".join(str(error).split())
        raise InputError(f"cannot be asked for: {said}; repair ~/.aws/config or AWS_PROFILE") from error
    options = {key: value for key, value in (("region", region), ("endpoint", endpoint)) if value}
    if unsigned:
        return options
    if found is None:
        raise InputError(
            "needs credentials, and there are none; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket"
        )
    return {**options, "credential_provider": _Credentials(found)}


class _Credentials:
    """Hands botocore's credentials to obstore, and renews them. They are never pickled: another process that
    gets this object finds its own."""

    def __init__(self, found: Any):
        self._found = found
        self()

    def __reduce__(self) -> tuple[Any, ...]:
        return _credentials_here, ()

    def __call__(self) -> dict[str, Any]:
        """Return the credentials that are valid now."""
        now = self._found.get_frozen_credentials()
        redact.keep_secret(now.access_key, now.secret_key, now.token)
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=10),
        }


def _credentials_here() -> Any:
    """Return a credential provider of this process; None where there are no credentials."""
    return _aws().get("credential_provider")


def secrets_of(client: Any) -> Iterator[Any]:
    """Return what obstore's store holds, and would pickle, that may be a credential."""
    provider = getattr(client, "credential_provider", None)
    if not (provider is None or isinstance(provider, _Credentials)):
        yield provider
    for name in ("config", "client_options"):
        yield from redact.secrets_in(getattr(client, name, None) or {})
    yield from redact.secrets_in({"endpoint": getattr(client, "url", None)})
