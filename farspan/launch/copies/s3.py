"""Copies of runs in a bucket of S3, or of a server that speaks its protocol: `s3://BUCKET/PREFIX`.

Credentials come from the environment (`AWS_ACCESS_KEY_ID` and its like), else from the profile of
`AWS_PROFILE` in ~/.aws/credentials, else from the machine or the container itself. The server
verifies each upload by the SHA-256 that its request is signed with.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from farspan.domain.cluster import Host
from farspan.domain.install import install_command
from farspan.domain.problems import Refusal
from farspan.domain.units import format_bytes
from farspan.launch.copies import ByteSource, CopyError, CopyPlace

if TYPE_CHECKING:
    from obstore.store import S3Store

#: Bytes of a part of an upload: S3 takes 10,000 parts of 5 MB or more. One is in memory at a time.
PART_BYTES = 2**24
#: A request takes no longer than this, a part of 16 MB at 0.3 MB/s; and is tried again for so long.
REQUEST_TIMEOUT_S = 60
RETRY_TIMEOUT_S = 90
MAX_RETRIES = 3
CONNECT_TIMEOUT_S = 5
#: Signs of the causes in the words of S3, and what they mean for people.
S3_CAUSES = {
    "NoSuchBucket": "there is no such bucket",
    "ExpiredToken": "the credentials have expired",
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "AccessDenied": "the credentials do not permit this",
    "/latest/api/token": "there are no credentials",
}


def open_places(location: str, hosts: Sequence[Host]) -> list[CopyPlace]:
    if importlib.util.find_spec("obstore") is None:
        raise Refusal(
            "extra-missing",
            what="copies in S3 need a library that is not installed",
            where=location,
            fact="there is no module named obstore",
            remedy=install_command("s3"),
        )
    return [S3Bucket(location)]


class S3Bucket:
    def __init__(self, location: str) -> None:
        from obstore.store import S3Store

        self.name = location
        bucket, _, prefix = location.removeprefix("s3://").partition("/")
        options: dict[str, Any] = {}
        profile = _read_profile()
        if profile is not None and "AWS_ACCESS_KEY_ID" not in os.environ:
            options |= profile
        endpoint = options.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", ""))
        # A server of the user's own, such as MinIO in the same house, may have no TLS.
        client = {
            "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "allow_http": endpoint.startswith("http://"),
        }
        retry = {
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
        }
        self._store: S3Store = S3Store(
            bucket,
            prefix=prefix.strip("/") or None,
            client_options=client,
            retry_config=retry,
            **options,
        )

    def list_folders(self) -> list[str]:
        import obstore

        with _explain_errors():
            listed = obstore.list_with_delimiter(self._store)
            return sorted(path.rstrip("/").rpartition("/")[2] for path in listed["common_prefixes"])

    def list_files(self, folder: str) -> dict[str, int]:
        import obstore

        sizes = dict[str, int]()
        with _explain_errors():
            for group in obstore.list(self._store, folder):
                for entry in group:
                    sizes[entry["path"].removeprefix(f"{folder}/")] = entry["size"]
        return sizes

    def read_file(self, name: str, most: int) -> bytes | None:
        import obstore

        with _explain_errors():
            try:
                answer = obstore.get(self._store, name)
                if answer.meta["size"] > most:
                    raise CopyError(f"{name} has more than {format_bytes(most)}")
                return bytes(answer.bytes())
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def put_file(self, name: str, content: ByteSource, size: int) -> None:
        import obstore

        with _explain_errors():
            if size <= PART_BYTES:
                body = content.read(size + 1)
                if len(body) != size:
                    raise CopyError(f"{name} has other than {size} bytes")
                obstore.put(self._store, name, body, use_multipart=False)
            else:
                # Each part waits for its bytes: the pacer's rate is the upload's.
                parts = _read_parts(content, size)
                obstore.put(self._store, name, parts, chunk_size=PART_BYTES, max_concurrency=1)
            stored = obstore.head(self._store, name)["size"]
        if stored != size:
            raise CopyError(f"{name} has {stored} bytes there, not {size}")

    def fetch_file(self, name: str, file: IO[bytes], size: int) -> None:
        import obstore

        received = 0
        with _explain_errors():
            for chunk in obstore.get(self._store, name):
                received += len(chunk)
                if received > size:
                    break
                file.write(chunk)
        if received != size:
            raise CopyError(f"{name} has not come whole")

    def delete_files(self, file_names: Sequence[str]) -> None:
        import obstore

        with _explain_errors():
            for name in file_names:
                obstore.delete(self._store, name)

    def checksum(self, name: str) -> None:
        return None


def _read_parts(content: ByteSource, size: int) -> Iterator[bytes]:
    """Yield a file in parts. Raises CopyError where it has another size."""
    remaining = size
    while chunk := content.read(PART_BYTES):
        remaining -= len(chunk)
        yield chunk
    if remaining:
        raise CopyError("a file has changed while it was copied")


def _read_profile() -> dict[str, str] | None:
    """Read the keys and the region of a profile in ~/.aws; None without keys.

    Profiles that log in otherwise are not read: `aws configure export-credentials` brings theirs
    into the environment.
    """
    profile = os.environ.get("AWS_PROFILE", "default")
    home = Path("~/.aws").expanduser()
    places = {
        "AWS_SHARED_CREDENTIALS_FILE": (home / "credentials", profile),
        "AWS_CONFIG_FILE": (home / "config", f"profile {profile}"),
    }
    values = dict[str, str]()
    for variable, (default, section) in places.items():
        parser = configparser.RawConfigParser()
        try:
            parser.read(os.environ.get(variable, default))
        except (OSError, configparser.Error):
            continue
        for name in (section, profile):
            if parser.has_section(name):
                values = {**dict(parser.items(name)), **values}
    if "aws_access_key_id" not in values or "aws_secret_access_key" not in values:
        return None
    known = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "endpoint_url": "endpoint",
        "region": "region",
    }
    # What the environment sets comes first.
    options = {known[key]: value for key, value in values.items() if key in known}
    if "AWS_REGION" in os.environ or "AWS_DEFAULT_REGION" in os.environ:
        options.pop("region", None)
    if "AWS_ENDPOINT_URL" in os.environ:
        options.pop("endpoint", None)
    return options


@contextmanager
def _explain_errors() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except CopyError:
        raise
    except (BaseError, OSError) as error:
        text = str(error)
        for sign, meaning in S3_CAUSES.items():
            if sign in text:
                raise CopyError(meaning) from None
        raise CopyError(" ".join(text.split())[:300]) from None
