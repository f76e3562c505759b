"""What a change is worth: the verdicts of the report, whose sentences are in `report/claims.html`.

A change counts as seen only where its 95 % interval over seeds leaves out zero; otherwise these seeds cannot tell. A change
that the way of resampling makes is not credited to the method: the same trained pairs have to show it without resampling too,
those of the seeds that have both.
"""

from eval.paper.numbers import Number

VERDICTS = {"yes": "Agrees", "no": "Does not agree", "open": "Cannot tell"}


def direction(change: Number) -> int:
    """+1 or -1 where the interval of a change lies on one side of zero, else 0."""
    return 0 if change.low is None else 1 if change.low > 0 else -1 if change.high < 0 else 0


def verdict(change: Number, wanted: int, beside: Number | None = None) -> str:
    """Whether a change is as the paper has it, with sign `wanted`, and so is that of the same pairs without resampling."""
    seen = direction(change)
    if seen == 0 or (beside is not None and direction(beside) != seen):
        return "open"
    return "yes" if seen == wanted else "no"


def verb(change: Number, rises: str = "rises", falls: str = "falls", level: str = "shows no clear change") -> str:
    """What a change does."""
    return {1: rises, -1: falls, 0: level}[direction(change)]


def is_mostly_gone(change: Number, beside: Number) -> bool:
    """Whether less than half of a change that is seen is left without resampling."""
    is_known = direction(change) != 0 and beside.low is not None
    return is_known and max(abs(beside.low), abs(beside.high)) < abs(change.value) / 2
