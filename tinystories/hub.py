"""A checkpoint by its name: a directory, or a repository of the Hugging Face Hub.

    checkpoint_directory("checkpoints/pocket/lm", "--lm")         a directory on this machine
    checkpoint_directory("owner/repository@revision", "--lm")     a commit, tag or branch, or main

Only what `load` reads is fetched, the weights as safetensors if the repository has them.
huggingface_hub downloads and caches; its environment variables apply, for example HF_HUB_OFFLINE.
"""

import functools
from pathlib import Path

from huggingface_hub import snapshot_download

from tinystories.checkpoint import CONFIG, INDEX, OLDER_TOKENIZER, POOLING, WEIGHTS, weight_files
from tinystories.errors import InputError, reason_of

SMALL = [CONFIG, POOLING, "tokenizer*.json", *OLDER_TOKENIZER]


def checkpoint_directory(name: str, flag: str) -> Path:
    """The directory of the checkpoint that the option `flag` names; InputError if there is none."""
    if Path(name).is_dir():
        return Path(name)
    repository, _, revision = name.partition("@")
    try:
        return fetch(repository, revision or None)
    except Exception as error:  # the libraries that download have no common base class
        fault = f"no such directory, and as a Hub repository: {reason_of(error)}"
        remedy = f"run `hf download` where it can be reached, and give {flag} the directory"
        raise InputError(f"{flag} {name}: {fault}; {remedy}") from error


@functools.cache  # a branch that moves meanwhile does not matter: one process uses one commit
def fetch(repository: str, revision: str | None) -> Path:
    """The cache's directory of a repository, with safetensors if it has them, else a pickle."""
    for weights in WEIGHTS:
        files = [*SMALL, weights, weights + INDEX, weights.replace(".", "-*-of-*.")]
        directory = Path(snapshot_download(repository, revision=revision, allow_patterns=files))
        if weight_files(directory)[0].exists():
            break
    return directory
