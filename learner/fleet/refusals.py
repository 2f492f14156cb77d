"""Why the learner's service does not do what a caller asks for, as errors."""

_MAX_NAME = 200  # characters of an actor's name


class InvalidRequest(ValueError):
    """An invalid request; the message names the value, the limit and the fix."""


class IncompatibleProtocol(ValueError):
    """The two sides use different major protocol versions."""


class Quarantined(RuntimeError):
    """The actor is refused for a while and may try again later."""


class NotOffered(RuntimeError):
    """This learner does not have what is asked for; the message says why and what to do."""


class UnknownActor(RuntimeError):
    """The caller has not joined, or another incarnation has joined since."""


class Unavailable(RuntimeError):
    """The learner cannot do this now; the message says why. The caller may try again later."""


def check_name(actor: str) -> None:
    """Raises InvalidRequest if a name is too long or not printable."""
    if not (1 <= len(actor) <= _MAX_NAME and actor.isprintable()):
        raise InvalidRequest(
            f"actor is {actor[:80]!r} ({len(actor)} characters): give it a name of 1 to "
            f"{_MAX_NAME} printable characters."
        )
