"""URLs of object storage: which are accepted, and what of them may be shown.

Credentials come from the environment, a file of the cloud's own tools, or the machine's role. A URL
that has some is refused, because it would stand in config.json, in logs and in `ps`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

PROTOCOLS = ("s3", "gs", "file")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ACCESS_POINT = re.compile(r"arn:aws[a-z-]*:s3[a-z-]*:[a-z0-9-]*:\d*:[A-Za-z0-9:_-]+")
# The name of a run's folder says when the run began, and what it is called.
_RUN = re.compile(r"\d{4}-\d{2}-\d{2}_\d{6}_[^/]+")
_RUN_URL = re.compile(rf"(.*/{_RUN.pattern})(?:/checkpoints(?:/(step_\d{{8,}}))?)?/*")
_USER = re.compile(r"(\w://)[^/\s@]*@")
# Variables of the clouds' tools and of fsspec whose values are secrets; a *_FILE is a path.
_SECRET = re.compile(r"(AWS|FSSPEC|GCSFS|GOOGLE)_\w*(KEY|SECRET|TOKEN|PASSWORD)\w*(?<!_FILE)")


def is_url(text: str) -> bool:
    """Return whether a text is a URL and not a path or a word."""
    return "://" in text


def protocol_of(url: str) -> str:
    """Return what stands before `://`."""
    return url.partition("://")[0]


def join(url: str, *names: str) -> str:
    """Return the URL of an object or a folder below `url`."""
    return "/".join([url.rstrip("/"), *names])


def is_run_name(name: str) -> bool:
    """Return whether a folder has the name of a run."""
    return bool(_RUN.fullmatch(name))


def run_of(url: str) -> tuple[str, str] | None:
    """Return the URL of a run, and the name of its checkpoint or "", that `url` names.

    None for the URL of anything else, such as a folder of several runs.
    """
    match = _RUN_URL.fullmatch(url)
    return (match[1], match[2] or "") if match else None


def problem_of(key: str, url: str) -> str | None:
    """Return why the value of a key is no URL of object storage, and the remedy; None if it is one.

    That of `resume` must name a run.
    """
    shown = f"{key} = {without_credentials(url)}"
    if not is_url(url):
        return f"{shown} is no URL; write s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or file:///FOLDER"

    protocol, _, rest = url.partition("://")
    if protocol not in PROTOCOLS:
        return f"{shown}: unknown protocol {protocol}; use one of {', '.join(PROTOCOLS)}"
    bucket, _, path = rest.partition("/")
    if protocol == "file":
        if bucket or not path:
            return f"{shown} is no absolute path; write three slashes, as in file:///mnt/runs"
    # What a presigned address has after its `?` are credentials, too.
    elif "@" in bucket or "?" in url or (":" in bucket and not _ACCESS_POINT.fullmatch(bucket)):
        return (
            f"{shown} contains more than a bucket and a folder; credentials in a URL would be written "
            "into config.json and logs: drop them, and set the variables of the cloud's own tools "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL; "
            "GOOGLE_APPLICATION_CREDENTIALS)"
        )
    elif not _BUCKET.fullmatch(bucket) and not _ACCESS_POINT.fullmatch(bucket):
        return f"{shown} names no bucket; write {protocol}://BUCKET/FOLDER"
    if key == "resume" and run_of(url) is None:
        return (
            f"{shown} names no run; write URL/RUN, or --resume auto --upload URL for the newest one "
            "that fits"
        )
    return None


def local_folder(url: str) -> Path | None:
    """Return the folder of a file:// URL, without symbolic links; None for another URL."""
    if protocol_of(url) != "file":
        return None
    return Path(url.partition("://")[2]).resolve()


def without_credentials(url: str) -> str:
    """Return what may be shown of a URL that has not been checked."""
    protocol, mark, rest = url.partition("://")
    if not mark:
        return url
    rest = rest.partition("?")[0]
    # A secret key may contain slashes, so the last @ counts.
    rest = rest.rpartition("@")[2]
    bucket, slash, path = rest.partition("/")
    if ":" in bucket and not _ACCESS_POINT.fullmatch(bucket):
        bucket = "..."
        path = "..." if path else ""
    return f"{protocol}://{bucket}{slash}{path}"


def is_secret(variable: str) -> bool:
    """Return whether the value of an environment variable is a secret of object storage."""
    return bool(_SECRET.fullmatch(variable))


def scrub(text: str, variables: Mapping[str, str] = os.environ) -> str:
    """Return a message of another package without credentials that it may quote."""
    for name, value in variables.items():
        if is_secret(name) and len(value) > 3:
            text = text.replace(value, "***")
    return _USER.sub(r"\1", text)
