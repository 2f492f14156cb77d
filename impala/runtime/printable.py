"""Makes text from other hosts safe to print on terminals and in logs."""


def printable(text: str, most: int = 200) -> str:
    r"""Returns the text on one line, with control and invisible characters escaped.

    Escape sequences, line ends, characters that change the writing direction and those without a
    width are escaped, as in `\x1b` and `\u202e`.

    Args:
      text: as received.
      most: largest number of characters; an ellipsis marks a longer text.
    """
    shown = "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in text[:most]
    )
    return shown + ("…" if len(text) > most else "")


def duration(seconds: float) -> str:
    """Returns a time in the unit that suits it."""
    return f"{seconds:.3g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"
