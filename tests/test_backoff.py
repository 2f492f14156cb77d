from impala.runtime.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 0.5)
    assert [backoff.pause(failures) for failures in (1, 2, 3, 4, 10**6)] == [
        0.1,
        0.2,
        0.4,
        0.5,
        0.5,
    ]
