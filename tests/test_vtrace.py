"""V-trace against the paper's sum, on inputs where every clip bites and every mistake shows."""

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import reference
import tensorflow as tf
from hypothesis import strategies as st

import vtrace

# All different, and each inside the range of rhos, so that none can stand in for another.
THRESHOLDS: dict[str, Any] = {
    "clip_rho_threshold": 3.7,
    "clip_pg_rho_threshold": 2.2,
    "clip_c_threshold": 1.3,
}
LAMBDA = 0.9

Inputs = dict[str, Any]


def make_inputs(shape: tuple[int, ...] = (7, 4), dtype: Any = np.float64, seed: int = 0) -> Inputs:
    """Rhos from 0.08 to 12, rewards and values that repeat nowhere, some ends of episodes."""
    rng = np.random.default_rng(seed)
    log_rhos = np.linspace(np.log(0.08), np.log(12.0), int(np.prod(shape)))
    inputs = {
        "log_rhos": rng.permutation(log_rhos).reshape(shape),
        "discounts": rng.uniform(0.8, 0.99, shape) * (rng.uniform(size=shape) > 0.1),
        "rewards": rng.normal(size=shape),
        "values": rng.normal(size=shape),
        "bootstrap_value": rng.normal(size=shape[1:]),
    }
    return {name: array.astype(dtype) for name, array in inputs.items()}


def assert_close(returns: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(returns.vs, expected.vs, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        returns.pg_advantages, expected.pg_advantages, rtol=tolerance, atol=tolerance
    )


def compiled(**options: Any) -> Callable[..., vtrace.VTraceReturns]:
    return tf.function(vtrace.from_importance_weights, autograph=False, **options)


WAYS_TO_RUN = {
    "eager": vtrace.from_importance_weights,
    "function": compiled(),
    "xla": compiled(jit_compile=True),
}


@pytest.mark.parametrize("run", WAYS_TO_RUN.values(), ids=WAYS_TO_RUN)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-4), (np.float64, 1e-9)])
@pytest.mark.parametrize("lambda_", [1.0, LAMBDA, 0.0])
def test_it_is_the_papers_sum(
    run: Callable[..., Any], dtype: Any, tolerance: float, lambda_: float
) -> None:
    inputs = make_inputs(dtype=dtype)
    returns = run(**inputs, **THRESHOLDS, lambda_=lambda_)
    assert returns.vs.dtype == returns.pg_advantages.dtype == dtype
    assert_close(returns, reference.vtrace(**inputs, **THRESHOLDS, lambda_=lambda_), tolerance)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).flatmap(
        lambda rest: st.integers(1, 9).map(lambda length: (length, *rest))
    ),
    thresholds=st.tuples(*[st.none() | st.floats(0.0, 13.0)] * 3),
    lambda_=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_and_any_thresholds(
    shape: tuple[int, ...],
    thresholds: tuple[float | None, float | None, float | None],
    lambda_: float,
    seed: int,
) -> None:
    inputs = make_inputs(shape, seed=seed)
    options: dict[str, Any] = {**dict(zip(THRESHOLDS, thresholds, strict=True)), "lambda_": lambda_}
    returns = vtrace.from_importance_weights(**inputs, **options)
    assert_close(returns, reference.vtrace(**inputs, **options))


@pytest.mark.parametrize("run", WAYS_TO_RUN.values(), ids=WAYS_TO_RUN)
@pytest.mark.parametrize("shape", [(1, 3), (5, 2, 3), (200, 2)])
def test_one_step_more_dimensions_and_long_unrolls(
    run: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    inputs = make_inputs(shape)
    assert_close(run(**inputs, **THRESHOLDS), reference.vtrace(**inputs, **THRESHOLDS))


def test_one_trace_serves_all_lengths_when_the_shape_is_unknown() -> None:
    def run(*tensors: tf.Tensor) -> vtrace.VTraceReturns:
        return vtrace.from_importance_weights(*tensors, **THRESHOLDS)

    for shape in ([None, None], None):
        last = shape and shape[1:]
        signature = [tf.TensorSpec(s, tf.float64) for s in (shape, shape, shape, shape, last)]
        unknown = tf.function(run, input_signature=signature, autograph=False)
        for length in (1, 2, 6):
            inputs = make_inputs((length, 3))
            assert_close(unknown(*inputs.values()), reference.vtrace(**inputs, **THRESHOLDS))


def test_on_policy_it_is_the_discounted_return() -> None:
    """Given rho = 1, v_s is r_s + gamma_s v_{s+1}, whatever the values in between say."""
    inputs = make_inputs()
    inputs["log_rhos"] = np.zeros_like(inputs["log_rhos"])
    target = inputs["bootstrap_value"]
    targets: list[np.ndarray] = []
    for reward, discount in zip(inputs["rewards"][::-1], inputs["discounts"][::-1], strict=True):
        target = reward + discount * target
        targets.insert(0, target)
    returns = vtrace.from_importance_weights(**inputs)
    np.testing.assert_allclose(returns.vs, targets)
    np.testing.assert_allclose(returns.pg_advantages, np.stack(targets) - inputs["values"])


@pytest.mark.parametrize("run", WAYS_TO_RUN.values(), ids=WAYS_TO_RUN)
@pytest.mark.parametrize("thresholds", [THRESHOLDS, dict.fromkeys(THRESHOLDS)], ids=["", "None"])
@pytest.mark.parametrize("cut", [0, 3, 6], ids="cut at {}".format)
def test_a_cut_separates_two_episodes_to_the_bit(
    run: Callable[..., Any], thresholds: dict[str, Any], cut: int
) -> None:
    """Given log_rho = -inf at a seam, the steps before it bootstrap from V there, to the bit."""
    inputs = make_inputs()
    inputs["log_rhos"][cut] = -np.inf
    returns = run(**inputs, **thresholds)
    np.testing.assert_array_equal(returns.pg_advantages[cut], 0.0)
    np.testing.assert_array_equal(returns.vs[cut], inputs["values"][cut])
    assert_close(returns, reference.vtrace(**inputs, **thresholds))
    if cut:
        before = {name: array[:cut] for name, array in inputs.items()}
        before["bootstrap_value"] = inputs["values"][cut]
        alone = run(**before, **thresholds)
        assert_close(
            returns._replace(vs=returns.vs[:cut], pg_advantages=returns.pg_advantages[:cut]), alone
        )

    # What comes behind the cut makes no difference before it, however wild.
    for name in ("rewards", "values"):
        inputs[name][cut + 1 :] = 1e30
    inputs["bootstrap_value"][:] = -1e30
    inputs["rewards"][cut] = 1e30
    wild = run(**inputs, **thresholds)
    for got, expected in zip(wild, returns, strict=True):
        np.testing.assert_array_equal(got[: cut + 1], expected[: cut + 1])


def test_no_gradient_flows() -> None:
    inputs = {name: tf.Variable(array) for name, array in make_inputs().items()}
    with tf.GradientTape(persistent=True) as tape:
        returns = vtrace.from_importance_weights(**inputs, **THRESHOLDS)
        targets = [tf.reduce_sum(tensor) for tensor in returns]
    for target in targets:
        assert tape.gradient(target, list(inputs.values())) == [None] * len(inputs)


@pytest.mark.parametrize("name", ["discounts", "rewards", "values", "bootstrap_value"])
@pytest.mark.parametrize("change", [lambda x: x[..., 1:], lambda x: x[None], lambda x: x[0]])
def test_a_wrong_shape_is_named(name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    inputs = make_inputs()
    inputs[name] = change(inputs[name])
    shape = tf.TensorShape(inputs[name].shape)
    with pytest.raises(ValueError) as caught:
        vtrace.from_importance_weights(**inputs)
    expected = "(4,)" if name == "bootstrap_value" else "(7, 4)"
    assert f"{name} has shape {shape}" in str(caught.value)
    assert f"it must be {expected}" in str(caught.value)


@pytest.mark.parametrize("name", THRESHOLDS)
@pytest.mark.parametrize("threshold", [-0.5, float("nan")])
def test_a_threshold_below_zero_is_refused(name: str, threshold: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {threshold}; it must be 0 or more, or None"):
        vtrace.from_importance_weights(**make_inputs(), **{name: threshold})


def test_without_a_threshold_infinite_weights_end_where_nothing_follows() -> None:
    """As of a density whose ratio overflows."""
    rows = tf.zeros([2, 1])
    for lambda_, discount in ((0.0, 1.0), (1.0, 0.0)):
        found = vtrace.from_importance_weights(
            log_rhos=tf.fill([2, 1], 100.0),
            discounts=tf.fill([2, 1], discount),
            rewards=rows + 1.0,
            values=rows,
            bootstrap_value=tf.zeros([1]),
            clip_c_threshold=None,
            lambda_=lambda_,
        )
        assert found.vs.numpy().tolist() == [[1.0], [1.0]]
