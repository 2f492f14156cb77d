"""Sentences of docs/wire-protocol.md beside the tests of what they say.

An actor in another language is written from that page. `@says("...")` above a test means that the
page says so in these words. A sentence that changes makes the test fail: look whether the test
still tests what the page says, and bring the quotation along. `test_page.py` finds sentences that
nothing quotes.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import ParamSpec

_P = ParamSpec("_P")

PAGE = pathlib.Path(__file__).parents[1].joinpath("docs", "wire-protocol.md").read_text("utf-8")


def normal(text: str) -> str:
    """Returns a text as one line, by which quotations are compared."""
    return " ".join(text.split())


_SAID = normal(PAGE)


def says(*sentences: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Marks a test of what the page says in these words."""

    def marked(test: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(test)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
            for sentence in sentences:
                assert normal(sentence) in _SAID, f"the page does not say any more: {sentence}"
            test(*args, **kwargs)

        return checked

    return marked
