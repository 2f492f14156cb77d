"""Compares the regret of trained bandit agents with hand-written strategies: table and figure.

`python -m benchmarks.bandits LOGDIR [LOGDIR ...] [--episodes 3000] [--output bandits.png]`
"""

import argparse
import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import matplotlib
import numpy as np

from impala.environments.bandit import BanditVector
from impala.logdir import checkpoint
from impala.play import evaluation
from impala.play.player import Player
from impala.runtime import process
from impala.types import EnvironmentStep, StepType

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


class Played(NamedTuple):
    """Episodes of one strategy."""

    rewards: np.ndarray  # [episodes, pulls]
    regret: np.ndarray  # [episodes, pulls] so far
    best: np.ndarray  # [episodes, pulls] whether the best arm was pulled


class Strategy(Protocol):
    """Chooses the arms that E bandits pull next, given the results of each arm so far."""

    def __call__(
        self, wins: np.ndarray, losses: np.ndarray, rng: np.random.Generator
    ) -> np.ndarray:
        """Returns arms [E]; wins and losses are [E, arms]."""


def random(wins: np.ndarray, losses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Pulls a random arm."""
    return rng.integers(wins.shape[1], size=len(wins))


def ucb1(wins: np.ndarray, losses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """UCB1, Auer et al. 2002: the mean so far plus sqrt(2 ln t / n), after each arm once."""
    count = wins + losses
    with np.errstate(divide="ignore", invalid="ignore"):
        bonus = np.sqrt(2.0 * np.log(count.sum(1, keepdims=True)) / count)
        index = np.where(count == 0, np.inf, wins / count + bonus)
    return _argmax(index, rng)


def thompson(wins: np.ndarray, losses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Thompson 1933: the best arm of a sample from the posterior, with uniform priors."""
    return _argmax(rng.beta(wins + 1.0, losses + 1.0), rng)


def greedy_dependent(wins: np.ndarray, losses: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Optimal for arms that pay with p and 1 - p: every pull is equally informative."""
    return _argmax(wins + losses[:, ::-1], rng)


def _argmax(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the argmax, with ties broken at random."""
    ties = values == values.max(axis=1, keepdims=True)
    return np.argmax(ties * rng.random(values.shape), axis=1)


def play(strategy: Strategy, problem: str, pulls: int, episodes: int, seed: int = 0) -> Played:
    """Plays one episode of a strategy in each of `episodes` bandits."""
    bandits = BanditVector(episodes, problem, pulls)
    bandits.reset(seed=seed)
    rng = np.random.default_rng([seed, 1])  # independent of the bandits, which have `seed`
    wins, losses = np.zeros((2, episodes, bandits.single_action_space.n))  # type: ignore[attr-defined]
    rows = np.arange(episodes)
    rewards, regrets, bests = [], [], []
    for _ in range(pulls):
        arms = strategy(wins, losses, rng)
        _, reward, _, _, info = bandits.step(arms)
        wins[rows, arms] += reward
        losses[rows, arms] += 1.0 - reward
        rewards.append(reward)
        regrets.append(info["regret"])
        bests.append(info["best"])
    return Played(*(np.stack(each, axis=1) for each in (rewards, regrets, bests)))


def play_agent(logdir: pathlib.Path, episodes: int, seed: int = 0) -> tuple[str, Played]:
    """Plays one episode of a trained agent per bandit. Returns the problem and the episodes."""
    process.hide_gpus()  # a learner may be using them
    player = Player(checkpoint.choose(logdir))
    with contextlib.closing(player.environment(episodes)) as environment:
        steps = evaluation.play(environment, player.agent, greedy=False, seed=seed)
        played = _one_episode(steps)
        id, _, _ = player.task.partition("{")
        return id.removeprefix("Bandit/").removesuffix("-v0"), played


def _one_episode(steps: Iterator[EnvironmentStep]) -> Played:
    rewards, regrets, bests = [], [], []
    next(steps)  # the reset
    for step in steps:
        rewards.append(step.timestep.reward.copy())
        regrets.append(step.info["regret"].copy())
        bests.append(step.info["best"].copy())
        if (step.timestep.step_type == StepType.LAST).all():
            break
    return Played(*(np.stack(each, axis=1) for each in (rewards, regrets, bests)))


def independent_optimum(pulls: int, discount: float = 1.0) -> float:
    """Regret of the best strategy on two arms with independent uniform priors.

    By dynamic programming over the results of each arm, backwards from the last pull. With a
    discount, for the strategy that is optimal if a reward k pulls later counts discount^k.
    """
    worth = np.zeros([pulls + 2] * 3)  # by wins and losses of arm 0 and wins of arm 1
    payoff = np.zeros([pulls + 2] * 3)
    for done in reversed(range(pulls)):
        n = done + 1
        wins_0, losses_0, wins_1 = np.ogrid[:n, :n, :n]
        losses_1 = np.maximum(done - wins_0 - losses_0 - wins_1, 0)
        p_0 = (wins_0 + 1.0) / (wins_0 + losses_0 + 2.0)
        p_1 = (wins_1 + 1.0) / (wins_1 + losses_1 + 2.0)

        worth_0, worth_1 = _pull(discount * worth, p_0, p_1)
        payoff[:n, :n, :n] = np.where(worth_0 >= worth_1, *_pull(payoff, p_0, p_1))
        worth[:n, :n, :n] = np.maximum(worth_0, worth_1)
    return pulls * 2.0 / 3.0 - float(payoff[0, 0, 0])  # the better of two is 2/3 on average


def _pull(later: np.ndarray, p_0: np.ndarray, p_1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the value of pulling either arm, now and later, if it pays with probability p."""
    n = len(p_0)
    won_0, lost_0 = later[1 : n + 1, :n, :n], later[:n, 1 : n + 1, :n]
    won_1, lost_1 = later[:n, :n, 1 : n + 1], later[:n, :n, :n]
    return p_0 * (1.0 + won_0) + (1 - p_0) * lost_0, p_1 * (1.0 + won_1) + (1 - p_1) * lost_1


def main() -> None:
    """Prints the table and draws the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bandits", description=__doc__)
    parser.add_argument("logdirs", type=pathlib.Path, nargs="+")
    parser.add_argument("--episodes", type=int, default=3000)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("bandits.png"))
    arguments = parser.parse_args()

    agents: dict[str, dict[str, Played]] = {}  # problem -> run -> episodes
    for logdir in arguments.logdirs:
        problem, played = play_agent(logdir, arguments.episodes)
        agents.setdefault(problem, {})[str(logdir)] = played
        if len({each.regret.shape for each in agents[problem].values()}) > 1:
            parser.error(f"{logdir} has {played.regret.shape[1]} pulls, the run before it others")
    print("| problem | agents, run by run | random | UCB1 | Thompson | optimum |")
    print("|---|---:|---:|---:|---:|---:|")
    figure, axes = plt.subplots(2, len(agents), figsize=(3.6 * len(agents), 6), squeeze=False)
    for (problem, runs), (above, below) in zip(agents.items(), axes.T, strict=True):
        pulls = next(iter(runs.values())).regret.shape[1]
        others = _others(problem, pulls, arguments.episodes)
        print(_row(problem, pulls, runs, others))
        _draw(above, below, problem, runs, others)
    figure.tight_layout()
    figure.savefig(arguments.output, dpi=100)
    print(arguments.output)


def _others(problem: str, pulls: int, episodes: int) -> dict[str, Played]:
    if problem == "ElevenArms":
        return {}
    strategies: dict[str, Strategy] = {"random": random, "UCB1": ucb1, "Thompson": thompson}
    if problem.startswith("Dependent"):
        strategies["optimum"] = greedy_dependent
    return {name: play(each, problem, pulls, episodes) for name, each in strategies.items()}


def _row(problem: str, pulls: int, runs: dict[str, Played], others: dict[str, Played]) -> str:
    """Returns a row: regret after the last pull, or the return for the eleven arms."""
    if problem == "ElevenArms":
        returns = ", ".join(f"{played.rewards.sum(1).mean():.2f}" for played in runs.values())
        best = 0.55 + 5.0 * (pulls - 1)  # the eleventh arm, and then the one that it tells of
        return f"| {problem} | return {returns} | | | | return {best:.2f} |"
    cells = [", ".join(f"{played.regret[:, -1].mean():.2f}" for played in runs.values())]
    cells += [f"{played.regret[:, -1].mean():.2f}" for played in others.values()]
    if problem == "Independent":
        cells.append(f"{independent_optimum(pulls):.2f}")
    cells += [""] * (5 - len(cells))
    return f"| {problem} | {' | '.join(cells)} |"


def _draw(
    above: Axes,
    below: Axes,
    problem: str,
    runs: dict[str, Played],
    others: dict[str, Played],
) -> None:
    """Plots regret over pulls, and the choices in the first episodes of the first run."""
    curves = {pathlib.Path(run).name: played for run, played in runs.items()} | others
    for name, played in curves.items():
        pulls = 1 + np.arange(played.regret.shape[1])
        above.plot(pulls, played.regret.mean(0), ":" if name in others else "-", label=name)
    above.set(title=problem, xlabel="pull", ylabel="regret", ylim=(0, None))
    above.legend(fontsize=7)
    first = next(iter(runs.values()))
    below.imshow(first.best[:80], aspect="auto", cmap="Greens", interpolation="nearest")
    below.set(xlabel="pull", ylabel="episode (dark: best arm)")


if __name__ == "__main__":
    main()
