"""A checkpoint by its name: a directory, or a repository of the Hugging Face Hub, fetched once and kept in its cache.

    checkpoint_directory("checkpoints/pocket/lm", "--lm")             a directory that is here
    checkpoint_directory("owner/repository@revision", "--lm")         a commit, tag or branch; main where none is named

Of a repository only what `load` reads is fetched: the configuration, the tokenizer and the weights, safetensors if it
has them, all of one commit. A transfer is watched (`transfer.py`), and what arrives is checked against the hash that
the Hub states, and removed if it differs.
A `pytorch_model.bin` is read without running anything in it and kept as safetensors beside the cache, under
HF_ASSETS_CACHE. A commit that is in the cache is read without the network.
"""

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from huggingface_hub import (
    constants,
    errors,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    set_client_factory,
    try_to_load_from_cache,
)
from huggingface_hub.utils import logging, validate_repo_id

from tinystories.checkpoint import (
    TOKENIZER_OPTIONS,
    TOKENIZERS,
    WEIGHTS,
    read_shards,
    read_weights,
    replacing,
    tokenizer_files,
    write_tensors,
)
from tinystories.errors import InputError, shortened
from tinystories.transfer import Watch, default_client_factory

NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
CONVERTED = "self-distilled-tsmc"


def checkpoint_directory(name: str, flag: str) -> Path:
    """The directory of a checkpoint named by the option `flag`; InputError says in one line how to get it."""
    with contextlib.suppress(OSError):  # a name too long for a path is no directory either
        if Path(name).is_dir():
            return Path(name)
        if Path(name).is_file():
            raise InputError(f"{flag} {name} is a file; give the directory that holds it")
    if found := NAME.fullmatch(name):
        with contextlib.suppress(errors.HFValidationError):
            validate_repo_id(found[1])
            return fetch(Repository(found[1], found[2] or constants.DEFAULT_REVISION, flag))
    fault = "no such directory, and no name of a Hub repository (owner/repository[@revision])"
    raise InputError(f"{flag} {name}: {fault}; give {flag} the directory of a checkpoint or such a name")


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Watch what a server sends, and keep what huggingface_hub logs and warns of off the screen, not its progress bar."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    set_client_factory(Watch().client)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        set_client_factory(default_client_factory)
        logging.set_verbosity(verbosity)


@dataclass(frozen=True)
class Repository:
    """A repository at a revision, and the option that named it."""

    name: str
    revision: str
    flag: str

    def refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        """Raise the InputError that says why a file of the repository is not here and how to fetch it elsewhere."""
        title, command = f"{self.flag} {self.name}", f"hf download {self.name}"
        if self.revision != constants.DEFAULT_REVISION:
            title, command = f"{title}@{self.revision}", f"{command} --revision {self.revision}"
        remedy = f"run `{command} --exclude '*/*' --local-dir DIR` where it can be reached and give {self.flag} DIR"
        raise InputError(f"{title}: no such directory, and as a Hub repository {reason}; {remedy}") from cause

    def explain(self, file: str, error: Exception) -> NoReturn:
        """Raise the InputError for what went wrong with a file."""
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # why the Hub could not be asked
        place = f"{constants.ENDPOINT}/{self.name}"
        if isinstance(error, errors.GatedRepoError):
            self.refuse(f"open only to those whom its owner lets in (ask at {place}, then `hf auth login`)", error)
        if isinstance(error, errors.RevisionNotFoundError):
            self.refuse(f"it has no revision {self.revision}", error)
        if isinstance(error, errors.RepositoryNotFoundError):
            self.refuse(f"not found at {place} (if it is private, `hf auth login`)", error)
        if isinstance(error, errors.OfflineModeIsEnabled):
            self.refuse(f"its {file} is not in the cache while HF_HUB_OFFLINE is set", error)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            fault = f"its {file} cannot be kept in {constants.HF_HUB_CACHE} ({error.strerror})"
            self.refuse(f"{fault}: make room there or set HF_HOME to another place", error)
        fault = shortened((str(error).splitlines() or [""])[0])
        self.refuse(f"its {file} could not be fetched ({type(error).__name__}: {fault})", error)

    def cached(self, file: str, revision: str) -> Path | bool | None:
        """A file in the cache; False where it is known that the repository has none; None where nothing is known."""
        found = try_to_load_from_cache(self.name, file, revision=revision)
        if found is None:
            return None
        return Path(found) if isinstance(found, str) else False

    def download(self, file: str, revision: str) -> Path | None:
        """Fetch a file into the cache and check it; None where the repository has none."""
        before = self.cached(file, revision)
        try:
            with watched():
                path = Path(hf_hub_download(self.name, file, revision=revision))
                if path == before:
                    return path
                linked = os.readlink(path) if path.is_symlink() else None
                url = hf_hub_url(self.name, file, revision=path.parent.name)
                stated = os.path.basename(linked) if linked else get_hf_file_metadata(url).etag
        except errors.RemoteEntryNotFoundError:
            return None
        except Exception as error:  # httpx, hf_xet and huggingface_hub share no base class
            self.explain(file, error)
        if not has_hash(path, stated):
            for bad in (path.parent / linked, path) if linked else (path,):
                bad.unlink()
            self.refuse(f"its {file} arrived with another hash than the Hub states and was removed (try again)")
        return path

    def first(self, files: tuple[str, ...], commit: str) -> Path | None:
        """The first of the files that the cache has or, if it has none, that the repository has; else None."""
        known = {file: self.cached(file, commit) for file in files}
        for path in known.values():
            if path:
                return path
        unknown = (file for file in files if known[file] is None)
        return next((path for file in unknown if (path := self.download(file, commit))), None)

    def need(self, file: str, commit: str) -> Path:
        """A file that must be there."""
        return self.first((file,), commit) or self.refuse(f"it holds no {file}")

    def snapshot(self) -> Path:
        """The cache's directory of the commit that the revision stands for, with config.json in it."""
        file = "config.json"
        here = self.cached(file, self.revision)
        if here and here.parent.name == self.revision:
            return here.parent
        if not here:  # ask once: hf_hub_download would try for half a minute where there is no network
            try:
                with watched():
                    get_hf_file_metadata(hf_hub_url(self.name, file, revision=self.revision))
            except errors.RemoteEntryNotFoundError as error:
                self.refuse(f"it holds no {file}", error)
            except Exception as error:  # as in `download`
                self.explain(file, error)
        path = self.download(file, self.revision) or self.refuse(f"it holds no {file}")
        return path.parent


def has_hash(path: Path, stated: str) -> bool:
    """Whether a file has the hash that the Hub states: sha256 of a large file, git's sha1 of a small one."""
    if len(stated) == 64:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == stated
    if len(stated) == 40:
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == stated
    return True  # some mirrors of the Hub state something else


@functools.cache
def fetch(repository: Repository) -> Path:
    """The directory with the files of a repository; asked once in a process, so that a branch cannot move meanwhile."""
    directory = repository.snapshot()
    commit = directory.name
    tokenizer = repository.first(tuple(names[0] for names in TOKENIZERS), commit)
    if tokenizer is None:
        repository.refuse(f"it holds no {TOKENIZERS[0][0]}")
    if tokenizer.name != TOKENIZERS[0][0]:
        for file in {names[0]: names[1:] for names in TOKENIZERS}[tokenizer.name]:
            repository.need(file, commit)
        repository.first((TOKENIZER_OPTIONS,), commit)
    weights = repository.first(WEIGHTS, commit)
    if weights is None:
        repository.refuse(f"it holds no {WEIGHTS[0]}")
    if weights.name.endswith(".index.json"):
        for file in read_shards(weights):
            repository.need(file, commit)
    if weights.name.startswith("pytorch_model.bin"):
        return converted(directory, Path(constants.HF_ASSETS_CACHE) / CONVERTED / repository.name / commit)
    return directory


def converted(directory: Path, kept: Path) -> Path:
    """`kept`, with the files of `directory` and its weights as safetensors. These come last: once there, all is."""
    weights = kept / WEIGHTS[0]
    if not weights.is_file():
        tensors, _ = read_weights(directory)
        for path in (directory / "config.json", *tokenizer_files(directory)):
            with replacing(kept / path.name) as temporary:
                shutil.copyfile(path, temporary)
        write_tensors(weights, {name: tensor.clone() for name, tensor in tensors.items()})  # tied tensors share memory
    return kept
