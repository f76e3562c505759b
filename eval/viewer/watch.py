"""The particles of one run in the terminal, step by step: `python -m tsmc RUN --watch`.

    particle   its slot                      copies   how many particles of the next step continue it, 0 where it ends
    from       the slot it continues         weight   its share of the weights gathered since the last resampling

The heaviest particles come first. On a terminal every step takes the screen, and a token's colour tells the sign of log psi;
elsewhere steps are plain blocks of text.
"""

import os
import shutil
import time

from tokenizers import Tokenizer
from torch import Tensor

from eval.run.command import printable
from eval.run.table import align
from eval.viewer.terminal import columns, is_screen, tail
from tsmc.sampler import Particles
from tsmc.trace import Trace
from tsmc.weights import normalise

CLEAR, PLAIN, BLUE, ORANGE = "\x1b[H\x1b[2J\x1b[3J", "\x1b[0m", "\x1b[1;38;5;33m", "\x1b[1;38;5;208m"
ROWS_IN_PIPE = 10
OTHER_LINES = 7  # of a step beside its particles


class Watch(Trace):
    """A trace of a single run that prints every step as it is recorded."""

    def __init__(self, prompt: str, tokenizer: Tokenizer, length: int, delay: float):
        """`length` steps are to come; after each the screen rests for `delay` seconds."""
        super().__init__()
        self.prompt, self.tokenizer, self.length, self.delay = prompt, tokenizer, length, delay
        self.screen = is_screen()
        self.coloured = self.screen and not os.environ.get("NO_COLOR")

    def __call__(self, particles: Particles, ancestors: Tensor) -> None:
        """Record and print a step."""
        super().__call__(particles, ancestors)
        size = shutil.get_terminal_size((110, ROWS_IN_PIPE + OTHER_LINES))
        shown = max(1, size.lines - OTHER_LINES) if self.screen else ROWS_IN_PIPE
        text = "\n".join(self.block(len(self.steps), particles.tokens[0], shown, size.columns))
        print(f"{CLEAR}{text}" if self.screen else f"{text}\n", flush=True)
        if self.screen:
            time.sleep(self.delay)

    def block(self, t: int, tokens: Tensor, shown: int, width: int) -> list[str]:
        """The lines of step t: tokens [K, t], the `shown` heaviest particles."""
        step = self.steps[-1]
        weights = normalise(step["log_weights"][0].cpu().double())  # [K]
        ancestors = step["ancestors"][0].tolist()
        origin = self.steps[-2]["ancestors"][0].tolist() if t > 1 else ["-"] * len(ancestors)
        copies = step["ancestors"][0].bincount(minlength=len(ancestors)).tolist()
        heaviest = weights.argsort(descending=True, stable=True)[:shown].tolist()
        cells = [["particle", "from", "copies", "log psi", "log w", "weight"]]
        for k in heaviest:
            numbers = (f"{step[name][0, k]:.2f}" for name in ("log_psi", "log_w"))
            cells.append([str(k), str(origin[k]), str(copies[k]), *numbers, f"{weights[k]:.3f}"])
        table = align(cells).splitlines()
        room = max(20, width - max(map(len, table)) - 2)
        lines = [*self.heading(t, ancestors, width), f"{table[0]}  text"]
        for line, k in zip(table[1:], heaviest, strict=True):
            text = self.text(tokens[k].tolist(), step["log_psi"][0, k].item(), room)
            lines.append(f"{line.ljust(len(table[0]))}  {text}")
        rest = len(ancestors) - len(heaviest)
        left = 1 - weights[heaviest].sum().item()
        return [*lines, f"and {rest} more of weight {abs(left):.3f} together"] if rest else lines

    def heading(self, t: int, ancestors: list[int], width: int) -> list[str]:
        """What happened at step t: the ESS, and who is copied how often."""
        particles, kept = len(ancestors), len(set(ancestors))
        ess = f"ESS {self.steps[-1]['ess'].item():.1f} of {particles}"
        if ancestors == list(range(particles)):
            return [
                tail(printable(self.prompt), width),
                f"step {t} of {self.length}   {ess}   every particle continues",
                "",
            ]
        times = sorted(((ancestors.count(k), k) for k in set(ancestors)), key=lambda pair: (-pair[0], pair[1]))
        copied = "copied: " + ", ".join(f"{k} x {count}" for count, k in times if count > 1)
        copied = copied if len(copied) <= width else copied[: width - 5].rsplit(",", 1)[0] + ", ..."
        resampled = f"resampled: {kept} continue, {particles - kept} end"
        return [tail(printable(self.prompt), width), f"step {t} of {self.length}   {ess}   {resampled}", copied, ""]

    def text(self, tokens: list[int], log_psi: float, room: int) -> str:
        """The end of a continuation in `room` columns, its last token between bars or in colour."""
        before, last = (
            printable(self.tokenizer.decode(part, skip_special_tokens=False)) for part in (tokens[:-1], tokens[-1:])
        )
        if not self.coloured:
            return tail(f"{before}|{last}|", room)
        last = tail(last, room)
        return tail(before, room - columns(last)) + (ORANGE if log_psi > 0 else BLUE) + last + PLAIN
