"""Text that others wrote, for terminals and logs: shown, and never obeyed."""


def printable(text: str, most: int = 200) -> str:
    r"""Returns the text on one line, with control and invisible characters as escapes.

    Escape sequences, line ends, characters that change the direction of writing and those without
    a width are written out, as in `\x1b` and `\u202e`.

    Args:
      text: as it came.
      most: characters of it that are shown; what is left out is marked by an ellipsis.
    """
    shown = "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in text[:most]
    )
    return shown + ("…" if len(text) > most else "")
