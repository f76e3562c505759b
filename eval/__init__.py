"""A job of Algorithm 1 and what its texts are worth: options, networks, rows, files, samples."""
