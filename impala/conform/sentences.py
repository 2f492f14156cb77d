"""The sentences of the page that the cases for actors are about."""

from collections.abc import Mapping

from learner.checks.mistakes import Kind

JOIN, STREAM, PARAMETERS = "Joining", "Messages and numbers", "Parameters"
MISTAKES, REFUSALS, UNKNOWN = "Mistakes", "Refusals", "A learner that does not know the actor"
PRESSURE, BROKEN, LOST = "Back-pressure", "A broken stream", "Receipts that get lost"
BACKOFF, RESTART, NEW_RUN = "Calls that fail", "A learner that comes back", "Another run"
FINISH, MAJOR, NEEDS = "The end of training", "Another major version", "A newer setting"

NUMBERED = "The messages of an incarnation are numbered 1, 2, 3, ..."
UNCHANGED = "A retry repeats the number and the contents."
IN_FLIGHT = (
    "An actor has at most `max_unrolls_in_flight` **messages** without a receipt, and stands still "
    "when it has that many and the next one is ready."
)
OWN_WEIGHTS = "Parameters always come from the learner: never act with weights of your own."
VALID = "A tensor is a `bytes` field with nothing but values:"
ONE_STREAM = "Keep one stream open at a time;"
# What an actor does with a message that was refused: by the reason, the row of the page.
FORGETS = {
    "REASON_TENSOR_COUNT": "forgets it",
    "REASON_TENSOR_SIZE": "forgets it",
    "REASON_NOT_FINITE": "forgets it",
    "REASON_RANGE": "forgets it",
    "REASON_MEANING": "forgets it; its program has to be mended",
}
JOINS = {
    "REASON_FINGERPRINT": "forgets it, and `Join`s for the new ones",
    "REASON_SEQUENCE": "forgets it; after a `Join` with its `acknowledged_sequence` the numbers "
    "agree again",
}
SMALLER = (
    "forgets it, and `Join`s for the new `limits.num_envs`; if its groups are larger it makes new "
    "ones, of environments that are reset (or exits and is started again)"
)
PULLS = "forgets it, and pulls parameters"
_QUARANTINED = (
    "the actor is quarantined, or its host has joined too often; the message says which, and for "
    "how long | tries again, with backoff, and keeps what has no receipt"
)
SENTENCE_OF = {
    Kind.SHIFTED_ACTIONS: "Row t holds the time step that the environment gave at t and the agent "
    "output that **led to it**",
    Kind.BYTE_ORDER: "C order (the last axis varies fastest), **little endian**, IEEE 754 floats",
    Kind.BEHAVIOUR_POLICY: "`output/policy` holds the parameters that the action was drawn from",
    Kind.IMPOSSIBLE_ACTION: "a choice that is masked, or has no probability by `output/policy`; a "
    "number more than ten deviations from its mean",
    Kind.ROW_0: "**Row 0** is row T of the same environment's unroll before, bit for bit.",
    Kind.SEAM: "a FIRST row with reward 0 and discount 1",
    Kind.SEAM_FRAMES: "`Unrolls.frames[i]` counts the environment frames (action repeats included) "
    "that environment i played in rows 1..T, without seams",
    Kind.MISSING_FRAMES: "at least 1 for each row that is not a seam",
    Kind.EPISODES: "Every episode whose LAST row is among rows 1..T is reported once, in "
    "`episodes`",
    Kind.EPISODE_RETURN: "the sum of its raw rewards, its agent steps, its frames",
    Kind.OBSERVATION: "as the environment gave it: single frames, never floats made of bytes",
    Kind.VERSION: "**Rows 1..T** are acted by one version of the parameters, the message's "
    "`learner_incarnation` and `parameter_version`.",
}
SENTENCES: Mapping[str, tuple[str, ...]] = {
    JOIN: (
        "An **incarnation** is a random 64-bit number, not 0, drawn when the actor process starts.",
        "All are 0 or empty at the first `Join`.",
        "`GetParameters` until there are some.",
        OWN_WEIGHTS,
    ),
    STREAM: (VALID, NUMBERED, UNCHANGED, ONE_STREAM),
    MISTAKES: tuple(SENTENCE_OF.values()),
    PARAMETERS: (
        "The same incarnation and a higher `newest_version` in a receipt: there is something to "
        "pull.",
    ),
    PRESSURE: (IN_FLIGHT,),
    BROKEN: (
        "`Join` again, with the same name and incarnation, then open a new stream and send again, "
        "in order and unchanged, every message that has no receipt.",
        "`acknowledged_unrolls` and `proof` are copied from that receipt",
    ),
    LOST: ("seen this number before: the receipt was lost on its way | forgets the message",),
    REFUSALS: (
        "the actor forgets the message, never sends it again, and goes on with the next number",
        *dict.fromkeys([*FORGETS.values(), *JOINS.values()]),
        SMALLER,
        PULLS,
        "An unknown status or reason, from a newer minor version, is treated as a rejection.",
    ),
    UNKNOWN: ("ends the stream, `Join`s, **sends the message again** under the same number",),
    BACKOFF: (
        _QUARANTINED,
        "no learner there, or it is stopping | tries again, with backoff",
        "0.1 s, doubled up to 10 s, each time multiplied by a random 0.5 to 1",
    ),
    RESTART: (
        "Another incarnation than the one held, in any reply or receipt: pull, whatever the "
        "version.",
    ),
    NEW_RUN: (
        "what has no receipt is worthless to it, so forget it, and build environments and agent "
        "anew from the new reply (or exit and be started again)",
    ),
    FINISH: (
        "An actor stops at the first of these signs, or waits for the next run by joining every "
        "few seconds with a new incarnation.",
    ),
    MAJOR: (
        "another major protocol version, or a newer process has joined under this name; the "
        "message says which | gives up",
    ),
    NEEDS: ("An actor that does not know one of them must give up rather than guess.",),
}
