"""A checkpoint by its name: a directory, or a repository of the Hugging Face Hub.

    checkpoint_directory("checkpoints/pocket/lm", "--lm")         a directory on this machine
    checkpoint_directory("owner/repository@revision", "--lm")     a commit, tag or branch, or main

Only what `load` reads is fetched: the configuration, the tokenizer and the weights, as safetensors
if the repository has them. huggingface_hub downloads and caches, and its environment variables
apply, for example HF_HUB_OFFLINE, HF_HOME and HF_TOKEN.
"""

import functools
import os
import re
import sys
from pathlib import Path

from huggingface_hub import errors, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from tinystories.checkpoint import TOKENIZER_OPTIONS, TOKENIZERS
from tinystories.errors import InputError, shortened

NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
SMALL = ["config.json", *(file for files in TOKENIZERS for file in files), TOKENIZER_OPTIONS]
SAFETENSORS = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
PICKLES = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]
REASONS = {
    errors.GatedRepoError: "its owner has to let you in: ask on its page, then `hf auth login`",
    errors.RevisionNotFoundError: "it has no such revision",
    errors.RepositoryNotFoundError: "the Hub does not have it; if it is private, `hf auth login`",
    errors.LocalEntryNotFoundError: "the Hub cannot be reached and it is not in the cache",
    errors.HFValidationError: "this is not a possible name",
}
"""What an error of the Hub means to a user; the first class that fits."""


def checkpoint_directory(name: str, flag: str) -> Path:
    """The directory of the checkpoint that the option `flag` names; InputError if there is none."""
    if os.path.isdir(name):
        return Path(name)
    if os.path.isfile(name):
        raise InputError(f"{flag} {name} is a file; give the directory that holds it")
    if not NAME.fullmatch(name):
        fault = "no such directory, and not a Hub repository (owner/repository[@revision])"
        raise InputError(f"{flag} {name}: {fault}; give {flag} an existing directory")
    repository, _, revision = name.partition("@")
    try:
        return fetch(repository, revision or None)
    except Exception as error:  # the libraries that download have no common base class
        reason = next((REASONS[kind] for kind in REASONS if isinstance(error, kind)), None)
        reason = reason or shortened(f"{type(error).__name__}: {error}".split("\n")[0])
        command = f"hf download {repository}" + (f" --revision {revision}" if revision else "")
        remedy = f"run `{command} --local-dir DIR` where it can be reached, and give {flag} DIR"
        fault = f"no such directory, and as a Hub repository: {reason}"
        raise InputError(f"{flag} {name}: {fault}; {remedy}") from error


@functools.cache  # a branch that moves meanwhile does not matter: one process uses one commit
def fetch(repository: str, revision: str | None) -> Path:
    """The cache's directory of a repository, with safetensors if it has any, else with pickles."""
    if not sys.stderr.isatty():
        disable_progress_bars()
    only_top, patterns = {"ignore_patterns": "*/*"}, SMALL + SAFETENSORS
    path = snapshot_download(repository, revision=revision, allow_patterns=patterns, **only_top)
    if not any(Path(path).glob("*.safetensors")):
        commit, patterns = Path(path).name, SMALL + PICKLES
        path = snapshot_download(repository, revision=commit, allow_patterns=patterns, **only_top)
    return Path(path)
