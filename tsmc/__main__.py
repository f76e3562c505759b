"""`python -m tsmc RUN [PROMPT ...]`: samples of a trained pair. Only an entry point: nothing imports it."""

from eval.sample import main

if __name__ == "__main__":
    main()
