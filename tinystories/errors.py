"""One exception for everything a user can put right: a file, an option, a weight."""


class InputError(ValueError):
    """Bad input. The message is one line that names the file or option and the remedy; `main.py` exits with code 2."""
