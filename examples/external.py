"""A program that owns its loop, and asks a learner what to do: carts with poles to balance.

    impala learner cartpole --listen 127.0.0.1:50051 --environment.id External \
      --environment.kwargs '{"observation_space": {"type": "Box", "shape": [4]},
                             "action_space": {"type": "Discrete", "n": 2}}'
    python external.py 127.0.0.1:50051

The physics are those of Barto, Sutton and Anderson 1983, as in Gymnasium's CartPole-v1.
"""

import argparse
import collections
import math

import numpy as np

import impala

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


def pushed(state: np.ndarray, to_the_right: bool) -> np.ndarray:
    """Returns position, speed, angle and angular speed after a fiftieth of a second."""
    _, speed, angle, turning = state
    sine, cosine, mass = math.sin(angle), math.cos(angle), CART + POLE
    push = (FORCE if to_the_right else -FORCE) + POLE * HALF_LENGTH * turning**2 * sine
    resistance = HALF_LENGTH * (4.0 / 3.0 - POLE * cosine**2 / mass)
    turns = (GRAVITY * sine - cosine * push / mass) / resistance
    speeds_up = (push - POLE * HALF_LENGTH * turns * cosine) / mass
    return state + SECONDS * np.array([speed, speeds_up, turning, turns])


def play(client: impala.Client, carts: int, seed: int) -> float:
    """Plays until training has ended. Returns the mean return of the last 100 episodes."""
    random = np.random.default_rng(seed)
    sessions = [client.session() for _ in range(carts)]
    states = random.uniform(-0.05, 0.05, (carts, 4))
    steps = [0] * carts
    returns: collections.deque[int] = collections.deque(maxlen=100)
    try:
        while True:
            for i, session in enumerate(sessions):
                states[i] = pushed(states[i], session.act(states[i]) == 1)
                session.reward(1.0)
                steps[i] += 1
                has_fallen = abs(states[i, 0]) > 2.4 or abs(states[i, 2]) > math.radians(12)
                if has_fallen or steps[i] == 500:
                    session.end(states[i], truncated=not has_fallen)
                    returns.append(steps[i])
                    states[i], steps[i] = random.uniform(-0.05, 0.05, 4), 0
    except impala.RunFinished:
        return sum(returns) / max(1, len(returns))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("learner")
    parser.add_argument("--carts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with impala.connect(options.learner) as client:
        print(f"{play(client, options.carts, options.seed):.1f}")
