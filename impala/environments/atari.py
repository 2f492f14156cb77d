"""Atari 2600 games through the Arcade Learning Environment's own vector environment (C++ threads).

Preprocessing of Mnih et al. 2015: grey frames, each action repeated, the maximum over the last two
frames, up to 30 no-ops at the start. Frames come singly (the agent stacks them) and rewards raw.
"""

import dataclasses
import difflib
from collections.abc import Sequence

import ale_py
import gymnasium as gym
import numpy as np
import tree
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from impala.config.schema import AtariConfig
from impala.environments import base
from impala.types import EnvironmentStep, Nest, StepType, TimeStep

gym.register_envs(ale_py)

# By game, as in the code of A3C that this follows.
_ACTION_TABLE = {
    "ALE/Pong-v5": ("NOOP", "RIGHT", "LEFT"),
    "ALE/Breakout-v5": ("FIRE", "RIGHT", "LEFT"),
}

# In three times 18,000 frames of random play without FIRE these games gave no reward, took no life
# and did not end; with FIRE they did.
_NEEDS_FIRE = frozenset(
    f"ALE/{name}-v5"
    for name in (
        *("BasicMath", "Blackjack", "Bowling", "Breakout", "Casino", "Crossbow", "DonkeyKong"),
        *("Hangman", "HumanCannonball", "NameThisGame", "Othello", "SirLancelot", "Tennis"),
        *("TicTacToe3D", "VideoPinball"),
    )
)


class Atari(base.Environment):
    """E copies of one game; observations are uint8 [height, width, 1].

    A step shows in `frames` how many frames it played, which is less than `frame_skip` where the
    game ended, and `info` has the `lives` left. Each `recv` gives new arrays.

    Args:
      id: as Gymnasium knows the game, such as ALE/MsPacman-v5.
      config: how it is played and seen.
      num_envs: E.
      threads: emulator threads.
      render_mode: rgb_array for `render`, human for a window with environment 0 in it.

    Raises:
      ValueError: if there is no such game, or it has no such actions.
    """

    def __init__(
        self,
        id: str,
        config: AtariConfig,
        num_envs: int,
        *,
        threads: int = 1,
        render_mode: str | None = None,
    ) -> None:
        self._config = config
        self._game = game(id)
        # ALE's defaults clip rewards, fire on reset and stack frames, so none is left to it.
        self._vector = AtariVectorEnv(
            self._game,
            num_envs,
            batch_size=0,  # all of them, in order
            num_threads=min(threads, num_envs),
            thread_affinity_offset=-1,
            max_num_frames_per_episode=config.max_frames_per_episode,
            repeat_action_probability=config.sticky_actions,
            full_action_space=config.full_action_set,
            continuous=False,
            continuous_action_threshold=0.5,
            autoreset_mode=AutoresetMode.NEXT_STEP,
            img_height=config.height,
            img_width=config.width,
            grayscale=True,
            stack_num=1,
            frameskip=config.frame_skip,
            maxpool=config.max_pool,
            noop_max=config.noop_max,
            # Both off: `terminated` is the end of the game, and a life loss is seen in the lives.
            episodic_life=False,
            life_loss_info=False,
            reward_clipping=False,
            use_fire_reset=False,
        )
        self._actions = _indices(id, config)  # by the agent's choice
        self.num_envs = num_envs
        self.action_space = gym.spaces.Discrete(len(self._actions))
        self._shape = (config.height, config.width, 1)
        self.observation_space = gym.spaces.Box(0, 255, self._shape, np.uint8)
        self._render_mode = render_mode
        self._screen: _Screen | None = None

    def reset(self, seed: int) -> TimeStep:
        seeds = base.seeds(seed, self.num_envs)
        observation, info = self._vector.reset(seed=seeds)
        self._remember(info, np.zeros(self.num_envs, np.bool_))
        if self._render_mode is not None:
            self._screen = _Screen(self._game, self._config, int(seeds[0]), self._render_mode)
            self._screen.start_episode(int(self._episode_frames[0]))
        return base.first_timestep(self._channels_last(observation), self.num_envs)

    def send(self, action: Nest) -> None:
        self._sent = self._actions[action]
        self._vector.send(self._sent)

    def recv(self) -> EnvironmentStep:
        observation, reward, terminated, truncated, info = self._vector.recv()
        first = self._ended
        frames = np.where(first, 0, info["episode_frame_number"] - self._episode_frames)
        life_lost = ~first & (info["lives"] < self._lives)
        self._remember(info, terminated | truncated)
        timestep = base.next_timestep(
            self._channels_last(observation), reward, terminated, truncated, first
        )
        if self._config.life_loss_ends:
            timestep.discount[life_lost] = 0.0
        step = EnvironmentStep(timestep, frames.astype(np.int32), {"lives": self._lives})
        if self._screen is not None:
            self._screen.follow(int(self._sent[0]), step, int(self._episode_frames[0]))
        return step

    def render(self) -> np.ndarray:
        if self._screen is None:
            raise ValueError("nothing to render: give a render_mode, then reset")
        return self._screen.picture()

    def close(self) -> None:
        self._vector.close()
        self._vector.ale = None  # its threads end with it
        self._screen = None

    def _remember(self, info: dict[str, np.ndarray], ended: np.ndarray) -> None:
        self._ended = ended
        self._lives = info["lives"]
        self._episode_frames = info["episode_frame_number"]  # no-ops of the start included

    def _channels_last(self, observation: np.ndarray) -> np.ndarray:
        """[E, 1, H, W] as [E, H, W, 1], without a copy."""
        return observation.reshape(self.num_envs, *self._shape)


class RandomSkip(base.Environment):
    """E copies of one game whose actions last for a random number of frames, as in Gym's v0 games.

    Args:
      id: as for `Atari`.
      config: as for `Atari`; an action lasts from `frame_skip` to `frame_skip_most` frames.
      num_envs: E.
      render_mode: as for `Atari`.

    Raises:
      ValueError: as `Atari`, or the settings do not fit.
    """

    def __init__(
        self, id: str, config: AtariConfig, num_envs: int, *, render_mode: str | None = None
    ) -> None:
        self._least, self._most = config.frame_skip, config.frame_skip_most
        if self._most < self._least or config.max_pool:
            raise ValueError(
                f"environment.atari.frame_skip_most is {self._most}, frame_skip {self._least} and "
                f"max_pool {config.max_pool}: frame_skip_most must be at least frame_skip, and "
                "max_pool off (--environment.atari.no-max-pool), as these games show their last "
                "frame."
            )
        single = dataclasses.replace(config, frame_skip=1, frame_skip_most=0)
        modes = [render_mode, *[None] * (num_envs - 1)]
        self._games = [Atari(id, single, 1, render_mode=mode) for mode in modes]
        self.num_envs = num_envs
        self.observation_space = self._games[0].observation_space
        self.action_space = self._games[0].action_space

    def reset(self, seed: int) -> TimeStep:
        self._random = np.random.default_rng(seed)
        self._ended = np.zeros(self.num_envs, np.bool_)
        seeds = base.seeds(seed, self.num_envs)
        each = [game.reset(int(own)) for game, own in zip(self._games, seeds, strict=True)]
        joined: TimeStep = tree.map_structure(lambda *leaves: np.concatenate(leaves), *each)
        return joined

    def send(self, action: Nest) -> None:
        self._action = action

    def recv(self) -> EnvironmentStep:
        lengths = self._random.integers(self._least, self._most + 1, self.num_envs)
        lengths[self._ended] = 1  # the action is ignored: an episode begins
        # Of each game, its rewards are summed, its discounts multiplied and its frames counted.
        reward, discount = np.zeros(self.num_envs, np.float32), np.ones(self.num_envs, np.float32)
        frames = np.zeros(self.num_envs, np.int32)
        each: list[EnvironmentStep | None] = [None] * self.num_envs
        for frame in range(self._most):  # all games at once, each in its thread
            plays = np.flatnonzero(frame < lengths)
            for i in plays:
                self._games[i].send(self._action[i : i + 1])
            for i in plays:
                each[i] = step = self._games[i].recv()
                reward[i] += step.timestep.reward[0]
                discount[i] *= step.timestep.discount[0]
                frames[i] += step.frames[0]
                if step.timestep.step_type[0] == StepType.LAST:
                    lengths[i] = 0
        joined: EnvironmentStep = tree.map_structure(lambda *leaves: np.concatenate(leaves), *each)
        self._ended = joined.timestep.step_type == StepType.LAST
        timestep = joined.timestep._replace(reward=reward, discount=discount)
        return joined._replace(timestep=timestep, frames=frames)

    def render(self) -> np.ndarray:
        return self._games[0].render()

    def close(self) -> None:
        for game in self._games:
            game.close()


class _Screen:
    """Environment 0's game, played a second time for its picture in colour.

    The vector environment has no screen. An emulator with the same seed that is given the same
    actions plays the same game, sticky actions and all; that it does is checked at each step.
    """

    def __init__(self, game: str, config: AtariConfig, seed: int, render_mode: str) -> None:
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale = ale_py.ALEInterface()
        self._ale.setInt("random_seed", seed)
        self._ale.setFloat("repeat_action_probability", config.sticky_actions)
        if render_mode == "human":
            self._ale.setBool("display_screen", True)
            self._ale.setBool("sound", True)
        self._ale.loadROM(roms.get_rom_path(game))
        self._actions = _action_set(self._ale, config)

    def start_episode(self, noops: int) -> None:
        self._ale.reset_game()
        for _ in range(noops):
            self._ale.act(ale_py.Action.NOOP)

    def follow(self, action: int, step: EnvironmentStep, episode_frames: int) -> None:
        """Plays environment 0's step, and checks that it went the same way."""
        reward = 0
        if step.timestep.step_type[0] == StepType.FIRST:
            self.start_episode(episode_frames)
        else:
            for _ in range(step.frames[0]):
                reward += self._ale.act(self._actions[action])
        seen = reward, self._ale.lives(), self._ale.getEpisodeFrameNumber()
        played = step.timestep.reward[0], step.info["lives"][0], episode_frames
        if seen != played:
            raise RuntimeError(
                "the screen no longer shows the game that is played: reward, lives and frame are "
                f"{seen}, and {played} in the game. Another version of ale-py may help."
            )

    def picture(self) -> np.ndarray:
        return self._ale.getScreenRGB()


def games() -> list[str]:
    """Returns the ids of all games."""
    return [id for id in gym.registry if id.startswith("ALE/")]


def game(id: str) -> str:
    """Returns the ROM's name of a Gymnasium id: ALE/MsPacman-v5 is ms_pacman.

    Raises:
      ValueError: there is no such game.
    """
    if id not in gym.registry:
        nearest = ", ".join(difflib.get_close_matches(id, games(), cutoff=0.5)) or "ALE/Pong-v5"
        raise ValueError(f"environment.id is {id!r}, which ALE does not have. Nearest: {nearest}.")
    return str(gym.spec(id).kwargs["game"])


def actions(id: str, config: AtariConfig) -> list[str]:
    """Returns the names of a game's actions, such as NOOP, in the order of the agent's choices.

    Raises:
      ValueError: there is no such game, or it has no such actions.
    """
    names = [*ale_py.Action.__members__] if config.full_action_set else _names(id, config)
    chosen = config.actions
    if config.action_table and chosen:
        raise ValueError(
            f"environment.atari.actions is {chosen} and environment.atari.action_table is true: "
            "leave out one of them (--environment.atari.no-action-table)."
        )
    if config.action_table and id in _ACTION_TABLE:
        return list(_ACTION_TABLE[id])
    if not chosen:
        return names
    if len(set(chosen)) != len(chosen) or not all(0 <= action < len(names) for action in chosen):
        raise ValueError(
            f"environment.atari.actions is {chosen}; the {len(names)} actions of {id} are 0 to "
            f"{len(names) - 1}, each at most once (18 with environment.atari.full_action_set)."
        )
    if id in _NEEDS_FIRE and not any("FIRE" in names[action] for action in chosen):
        of_game = ", ".join(f"{i} {name}" for i, name in enumerate(names))
        raise ValueError(
            f"environment.atari.actions is {chosen}, which leaves out FIRE: without it nothing "
            f"happens in {id}. Its actions are {of_game}: include one with FIRE, or all of them by "
            "leaving the setting out."
        )
    return [names[action] for action in chosen]


def check_joint(tasks: Sequence[tuple[str, str, AtariConfig]]) -> None:
    """Checks that games that are tasks of one run have the same actions.

    Args:
      tasks: name, id and settings of each.

    Raises:
      ValueError: an action of one game is another one in another game.
    """
    first, *others = [(name, actions(id, config)) for name, id, config in tasks]
    for name, names in others:
        if names == first[1]:
            continue
        index = next(
            (i for i, pair in enumerate(zip(first[1], names, strict=False)) if pair[0] != pair[1]),
            min(len(first[1]), len(names)),
        )
        differ = " and ".join(
            f"{of[index] if index < len(of) else 'missing'} in {task}"
            for task, of in (first, (name, names))
        )
        raise ValueError(
            f"{first[0]} and {name} cannot be tasks of one run with these actions: a network has "
            f"one output for each action, but action {index} is {differ}. Set "
            "environment.atari.full_action_set (--environment.atari.full-action-set), which gives "
            "every game the same 18 actions, and leave out environment.atari.action_table."
        )


def _action_set(ale: ale_py.ALEInterface, config: AtariConfig) -> list[ale_py.Action]:
    """Returns the actions that the loaded game has, or those of them that it reads."""
    return list(ale.getLegalActionSet() if config.full_action_set else ale.getMinimalActionSet())


def _names(id: str, config: AtariConfig) -> list[str]:
    """Returns the names of the emulator's set of actions."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.loadROM(roms.get_rom_path(game(id)))
    return [action.name for action in _action_set(ale, config)]


def _indices(id: str, config: AtariConfig) -> np.ndarray:
    """Returns where the agent's choices are in the emulator's set of actions."""
    names = _names(id, config)
    # Skiing has no actions with the button: it is as if it were not pressed.
    own = [
        name if name in names else name.removesuffix("FIRE") or "NOOP"
        for name in actions(id, config)
    ]
    return np.array([names.index(name) for name in own])
