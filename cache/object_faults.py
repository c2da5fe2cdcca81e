"""What an object store's refusal means, in one line that says what to do."""

import os
import re

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

from schemas.errors import DflashError, OptionError, StoreFault

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# What stands in a message where the environment has no credentials: the addresses at which machines in a cloud ask for some, and
# what the library says of half a pair.
CREDENTIAL_SOURCES = (
    *("169.254.169.254", "169.254.170.2", "/latest/api/token", "metadata.google.internal", "token request"),
    *("Missing AccessKeyId", "Missing SecretAccessKey", "MissingAccount"),
)
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
CREDENTIALS = {
    "s3": 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (of a profile: eval "$(aws configure export-credentials --format env)")',
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def endpoint_of(scheme: str, url: str) -> str | None:
    """Where the environment says that S3 is, or None for the provider's own address. Raises OptionError for what is no address."""
    name = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if scheme != "s3" or name is None:
        return None
    endpoint = os.environ[name]
    if re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint) is None:
        raise OptionError(f"{url}: {name}={endpoint!r} is no address: give http://HOST:PORT or https://HOST")
    return endpoint


def no_bucket(fault: BaseException) -> bool:
    """Whether a "not found" is about the bucket, not an object."""
    return any(mark in str(fault) for mark in NO_BUCKET)


def behind_the_end(fault: BaseException) -> bool:
    """Whether a range was refused since the object ends before it."""
    return "Range Not Satisfiable" in str(fault)


def explained(url: str, fault: BaseException) -> DflashError:
    """obstore's exception as an error of ours."""
    scheme, rest = url.split("://", 1)
    endpoint = endpoint_of(scheme, url)
    at = endpoint or {"s3": "AWS", "gs": "Google Cloud Storage", "az": "Azure"}[scheme]
    # The first line has the request and the reason; what follows is the library's own view of them, over many lines.
    line = str(fault).split("\n\nDebug source")[0].replace("\n", " ")
    code = re.search(r"<Code>(\w+)</Code>", line)
    reason = code[1] if code else line.rsplit(" - ", 1)[-1].strip()[:200]
    if no_bucket(fault):
        return OptionError(f"{url}: {at} has no bucket {rest.split('/')[0]!r}: create it, or name another")
    if any(mark in str(fault) for mark in CREDENTIAL_SOURCES):
        return OptionError(f"{url}: no credentials for {at} ({reason}): {CREDENTIALS[scheme]}")
    if isinstance(fault, PermissionDeniedError | UnauthenticatedError):
        return OptionError(f"{url}: {at} refuses ({reason}): check the credentials and what they may do there")
    if "HTTP error" in line:
        elsewhere = "the network, and AWS_ENDPOINT_URL where it is not AWS's own"
        check = f"{endpoint} and the network" if endpoint else elsewhere if scheme == "s3" else "the network"
        return StoreFault(f"{url}: {at} cannot be reached ({reason}): check {check}, then run the same command again")
    return StoreFault(f"{url}: {at} fails ({reason}): run the same command again when it is well")
