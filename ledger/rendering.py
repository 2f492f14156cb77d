"""Renders pages from templates and records, and checks that they are what their records give.

A page is `ledger/pages/NAME.md`, a Jinja template whose functions are those of `_Page` without an
underscore. It names dates and commits of its records, so no change of the code makes it wrong.
"""

import difflib
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import jinja2

from ledger import continual, pictures, records, statistics
from ledger.experiments import EXPERIMENTS, Experiment
from ledger.records import Ledger, Record

# Template -> the file that it becomes, or a part of: that between two comments with its name.
PAGES = {
    "results": "docs/results/README.md",
    "bandits": "docs/results/bandits.md",
    "continual": "docs/results/continual.md",
    "vtrace": "docs/results/vtrace.md",
    "expectations": "README.md",
}
_PARTS = ("expectations",)

_DASH = "—"
_OTHER_CORES = 0.2  # used by others, from which on a time is of a busy machine


class Rendered(NamedTuple):
    """A page, and the pictures on it."""

    text: str
    pictures: dict[str, pictures.Picture]  # file name -> what it shows


class RenderError(ValueError):
    """A template asks for something that is not there."""


def render(root: pathlib.Path) -> list[str]:
    """Writes all pages and pictures that are not what their records give; returns their paths."""
    ledger, written = records.read(root), []
    for name, target in PAGES.items():
        path = root / target
        rendered = _rendered(name, root, ledger)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = _placed(name, before, rendered.text)
        if after != before:
            path.write_text(after, encoding="utf-8")
            written.append(target)
        for file, picture in rendered.pictures.items():
            place = path.parent / file
            if pictures.digest_in(place) != picture.digest:
                pictures.draw(picture, place)
                written.append(str(place.relative_to(root)))
    return written


def check(root: pathlib.Path) -> list[str]:
    """Returns how pages and pictures differ from what their records give."""
    problems: list[str] = []
    ledger = records.read(root)
    for name, target in PAGES.items():
        path = root / target
        if not path.exists():
            problems.append(f"{target} is missing.")
            continue
        text = path.read_text(encoding="utf-8")
        rendered = _rendered(name, root, ledger)
        if (expected := _placed(name, text, rendered.text)) != text:
            lines = difflib.unified_diff(
                *(text.splitlines(), expected.splitlines()),
                *(target, "what its records give"),
                lineterm="",
                n=0,
            )
            problems.append("\n".join(lines))
        for file, picture in rendered.pictures.items():
            if pictures.digest_in(path.parent / file) != picture.digest:
                problems.append(f"{file} on {target} is not what its records give.")
    return problems


def _rendered(name: str, root: pathlib.Path, ledger: Ledger) -> Rendered:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(root / "ledger/pages"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = _Page(ledger)
    functions = {x: getattr(page, x) for x in dir(page) if not x.startswith("_")}
    text = environment.get_template(f"{name}.md").render(functions)
    if name not in _PARTS:
        source = f"ledger/pages/{name}.md"
        text = f"<!-- Rendered by `make results` from {source} and records: edit these. -->\n{text}"
    return Rendered(text, page._drawn)


def _placed(name: str, text: str, rendered: str) -> str:
    """Returns a file with what a template gives in its place."""
    if name not in _PARTS:
        return rendered
    begin, end = f"<!-- {name}: rendered by `make results` -->\n", f"<!-- end of {name} -->\n"
    if begin not in text or end not in text:
        raise RenderError(f"{PAGES[name]} needs the lines {begin.strip()} and {end.strip()}.")
    before, _, rest = text.partition(begin)
    return before + begin + rendered + end + rest.partition(end)[2]


class _Page:
    """The functions of a template, which note what they show."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._drawn: dict[str, pictures.Picture] = {}

    # Measured results.

    def results(self, *experiments: str) -> str:
        """Returns a table of experiments: a row for each arm that has records.

        Experiments without records are named below it.
        """
        head = (
            *("command", "seeds", "score", "mean (95%)", "median", "interquartile mean (95%)"),
            *("lowest to highest", "frames", "training", "measured"),
        )
        found = [(EXPERIMENTS[name], arm) for name in experiments for arm in EXPERIMENTS[name].arms]
        table = [
            (
                f"`{_without_seed(of_seeds[0])}`",
                _range([record.seed for record in of_seeds]),
                _kind(experiment, of_seeds[0]),
                *_aggregates([statistics.SCORES[experiment.score](x) for x in of_seeds]),
                _millions(max(record.frames for record in of_seeds)),
                _durations(of_seeds),
                _measured(of_seeds),
            )
            for experiment, arm in found
            if (of_seeds := self._records(experiment.name, arm))
        ]
        missing = [
            f"`{x.name if x.name == arm else f'{x.name}/{arm}'}`"
            for x, arm in found
            if not self._records(x.name, arm)
        ]
        parts = [_table(head, table)] if table else []
        parts += [f"Not measured in this way yet: {', '.join(missing)}."] if missing else []
        return "\n\n".join(parts)

    def arms(self, experiment: str, *scores: str) -> str:
        """Returns a table with a row for each arm of an experiment, and a column for each score."""
        rows = [
            (
                *(arm, _range([record.seed for record in of_seeds])),
                *(self._interval(of_seeds, score) for score in scores),
                _measured(of_seeds),
            )
            for arm in EXPERIMENTS[experiment].arms
            if (of_seeds := self._records(experiment, arm))
        ]
        head = ("arm", "seeds", *(f"{score} (95%)" for score in scores), "measured")
        return _table(head, rows) if rows else "Not measured yet."

    def by_task(self, experiment: str) -> str:
        """Returns a table with a row for each arm of an experiment, and the return of each task."""
        arms = self._arms(experiment)
        finals = {arm: [*map(statistics.by_task, of_seeds)] for arm, of_seeds in arms.items()}
        tasks = list(
            dict.fromkeys(task for runs in finals.values() for run in runs for task in run)
        )
        rows = []
        for arm, runs in finals.items():
            scores = [[run[task] for run in runs if task in run] for task in tasks]
            cells = [_shown_interval(statistics.interval(s)) if s else _DASH for s in scores]
            seeds = _range([record.seed for record in arms[arm]])
            rows.append((arm, seeds, *cells, _measured(arms[arm])))
        head = ("arm", "seeds", *(f"{task} (95%)" for task in tasks), "measured")
        return _table(head, rows) if rows else "Not measured yet."

    def human_normalised(
        self, experiment: str, together: str, scales: Mapping[str, tuple[float, float]]
    ) -> str:
        """Returns a table of what one agent of several games comes to beside their specialists.

        Args:
          experiment: with an arm for each game, named as the game in lower case.
          together: the arm of all games.
          scales: game -> returns of random play and of a human, which are 0 and 1.
        """
        rows, normalised = [], list[list[list[float]]]()  # of games, of agents, of seeds
        for game, (random, human) in scales.items():
            arms = self._arms(experiment, (game.lower(), together))
            played = statistics.by_task(arms[together][0]) if together in arms else ()
            if (task := next((name for name in played if game in name), None)) is None:
                continue
            returns = [
                [statistics.by_task(x)[task] for x in arms.get(arm, ())]
                for arm in (game.lower(), together)
            ]
            scaled = [[(x - random) / (human - random) for x in agent] for agent in returns]
            normalised.append(scaled)
            share = _DASH
            if all(scaled):
                found = dict(zip(("one", "all"), scaled, strict=True))
                share = _shown_interval(
                    statistics.interval_of(found, lambda x: x["all"] / x["one"])
                )
            rows.append((game, *map(_shown_mean, (*returns, *scaled)), share))
        if not rows:
            return "Not measured yet."
        means = [
            [fmean(of_games) for of_games in zip(*agent, strict=False)]
            for agent in zip(*normalised, strict=True)
        ]
        rows.append(("mean", "", "", *map(_shown_mean, means), ""))
        scaled_heads = ("specialist, normalised", "together, normalised")
        head = ("game", "specialist", "together", *scaled_heads, "share")
        return _table(head, rows)

    def score(self, experiment: str, arm: str, score: str = "return") -> str:
        """Returns an arm's score with its interval, for a table of the template's own."""
        of_seeds = self._records(experiment, arm)
        return self._interval(of_seeds, score) if of_seeds else "not measured yet"

    def milestones(self, experiment: str) -> str:
        """Returns a table of when each seed's training return came to the milestones."""
        thresholds, arms = EXPERIMENTS[experiment].milestones, EXPERIMENTS[experiment].arms
        rows = []
        for record in (record for arm in arms for record in self._records(experiment, arm)):
            points = [statistics.first(record, threshold) for threshold in thresholds]
            cells = [
                f"{_millions(point.frames)}, {point.seconds / 60:.1f} min" if point else _DASH
                for point in points
            ]
            rows.append((*([record.arm] if len(arms) > 1 else ()), str(record.seed), *cells))
        head = (
            *(["arm"] if len(arms) > 1 else ()),
            *("seed", *(_number(each, digits=2 * (each % 1 > 0)) for each in thresholds)),
        )
        return _table(head, rows) if rows else "Not measured in this way yet."

    def frames_to(self, experiment: str, of: str) -> str:
        """Returns a table of frames until training returns came to the return of another arm.

        Args:
          experiment: its name.
          of: the arm; each seed is held against this arm's of the same seed, the mean over the last
            fifth of its frames. Seeds that not every arm has are left out.
        """
        arms = self._arms(experiment)
        of_all = [{x.seed for x in of_seeds} for of_seeds in arms.values()]
        ends = {
            x.seed: statistics.late(x)
            for x in arms.pop(of, ())
            if all(x.seed in seeds for seeds in of_all)
        }
        rows = []
        for arm, of_seeds in arms.items() if ends else ():
            held = [x for x in of_seeds if x.seed in ends]
            points = [statistics.first(x, ends[x.seed]) for x in held]
            frames = [
                point.frames if point else x.frames for x, point in zip(held, points, strict=True)
            ]
            more = ["" if point else "> " for point in points]
            cells = [f"{m}{_millions(x)}" for m, x in zip(more, frames, strict=True)]
            rows.append((arm, *cells, max(more) + _millions(sum(frames))))
        ended = (f"{seed}: {_number(end)}" for seed, end in ends.items())
        return _table(("arm", *ended, "together"), rows) if rows else "Not measured yet."

    def curves(
        self,
        file: str,
        alt: str,
        *experiments: str,
        arms: Sequence[str] = (),
        panels: Mapping[str, Mapping[str, str]] = {},
        source: str = "training",
    ) -> str:
        """Returns a picture of the curves of experiments, a panel for each; its arms are lines.

        Args:
          file: its name.
          alt: what it shows.
          experiments: those without records are left out.
          arms: only these; (): all of them.
          panels: of one experiment: title -> line's name -> arm; {}: all arms in one panel.
          source: "training": return in training; "evaluations": of evaluators beside it.
        """
        drawn = []
        for name in experiments:
            titles = panels or {"" if len(experiments) == 1 else name: {}}
            for title, lines in titles.items():
                measured = self._arms(name, [*lines.values()] or arms)
                names = {arm: line for line, arm in lines.items()}
                named = {names.get(arm, arm): of_seeds for arm, of_seeds in measured.items()}
                drawn += pictures.panels(title, named, source)
        if not drawn:
            return "No curves have been recorded yet."
        self._drawn[file] = pictures.Picture(tuple(drawn))
        return f"![{alt}]({file})"

    def beside(self, file: str, alt: str, panels: Mapping[str, Mapping[str, str]]) -> str:
        """Returns a picture of the return in training over frames and over minutes.

        Args:
          file: its name.
          alt: what it shows.
          panels: title -> line's name -> "experiment/arm", where an experiment may be one of peers,
            which have records only.
        """
        drawn: list[pictures.Panel] = []
        for title, lines in panels.items():
            found = {line: self._records(*name.split("/")) for line, name in lines.items()}
            drawn += pictures.clocked(title, {x: y for x, y in found.items() if y})
        if not any(panel.lines for panel in drawn):
            return "No curves have been recorded yet."
        self._drawn[file] = pictures.Picture(tuple(drawn))
        return f"![{alt}]({file})"

    def choices(self, file: str, alt: str, info: str, *experiments: str) -> str:
        """Returns a picture of what was chosen in each step of some episodes after training.

        There is a panel for each arm, of its first seed.

        Args:
          file: its name.
          alt: what it shows.
          info: 1 where the choice is drawn dark, 0 where it is left white.
          experiments: those without records are left out.
        """
        grids = [
            pictures.Grid(arm, of_seeds[0].final[0].steps[info])
            for name in experiments
            for arm, of_seeds in self._arms(name).items()
        ]
        if not grids:
            return "No choices have been recorded yet."
        self._drawn[file] = pictures.Picture(tuple(grids))
        return f"![{alt}]({file})"

    # Sequences of tasks.

    def sequence(self, *experiments: str) -> str:
        """Returns a table of the arms of `ledger.sequences`: area, forgetting and transfer.

        Experiments with other seeds, and the same tasks in another order, count as one.
        """
        areas = self._areas(*experiments)
        best = statistics.interval([*areas.get("simultaneous", {}).values()] or [math.nan]).mean
        rows = []
        for arm in EXPERIMENTS[experiments[0]].arms:
            of_seeds = [x for each in experiments for x in self._records(each, arm)]
            if not of_seeds:
                continue
            area = statistics.interval([*areas[arm].values()]) if arm in areas else None
            rows.append(
                (
                    *(arm, _range([record.seed for record in of_seeds])),
                    *((_shown_interval(area), _number(area.mean / best)) if area else (_DASH,) * 2),
                    *(self._interval(of_seeds, score) for score in ("forgetting", "transfer")),
                    _measured(of_seeds),
                )
            )
        head = (
            *("arm", "seeds", "area (95%)", "of simultaneous"),
            *("forgetting (95%)", "transfer (95%)", "measured"),
        )
        return _table(head, rows) if rows else "Not measured yet."

    def claims(self, *experiments: str) -> str:
        """Returns a table of CLEAR's claims: the paper's figure, the one here, and the verdict."""
        rows = []
        for each, found, verdict in continual.judged(self._areas(*experiments)):
            ours = (_shown_interval(found) if found else _DASH, verdict)
            side = "above" if each.is_above else "below"
            limit = f"{side} {_number(each.limit, 1)}"
            rows.append((each.text, each.quantity, limit, each.paper, *ours))
        head = ("claim", "number", "holds if", "in the paper", "here (95%)", "verdict")
        return _table(head, rows)

    def _areas(self, *experiments: str) -> dict[str, dict[int, float]]:
        """Returns the areas of experiments whose seeds differ: arm -> seed -> area."""
        areas = dict[str, dict[int, float]]()
        for experiment in experiments:
            for arm, of_seeds in continual.areas(self._arms(experiment)).items():
                areas.setdefault(arm, {}).update(of_seeds)
        return areas

    def effects(self, experiment: str, arm: str) -> str:
        """Returns the matrix of forgetting and transfer of an arm: a row for each block."""
        of_seeds = self._records(experiment, arm)
        if not of_seeds:
            return "Not measured yet."
        names = statistics.continual_run(of_seeds[0]).tasks
        rows: dict[tuple[int, int], list[str]] = {}
        for effect in continual.effects(of_seeds):
            cells = rows.setdefault((effect.block.start, effect.block.task), [_DASH] * len(names))
            known = effect.forgetting if effect.transfer is None else effect.transfer
            kind = "" if effect.transfer is None else " gained"
            cells[effect.task] = f"{_number(known or 0.0)}{kind}"
        table = [(f"{_millions(start)}, {names[task]}", *c) for (start, task), c in rows.items()]
        return _table(("trained from", *names), table)

    def _arms(self, experiment: str, arms: Sequence[str] = ()) -> dict[str, Sequence[Record]]:
        """Returns those arms that have records, of all or of these."""
        names = arms or list(EXPERIMENTS[experiment].arms)
        found = {arm: self._records(experiment, arm) for arm in names}
        return {arm: of_seeds for arm, of_seeds in found.items() if of_seeds}

    # What they share.

    def _records(self, experiment: str, arm: str) -> Sequence[Record]:
        return self._ledger.get((experiment, arm), [])

    def _interval(self, of_seeds: Sequence[Record], score: str) -> str:
        scores = [statistics.SCORES[score](record) for record in of_seeds]
        if any(map(math.isnan, scores)):
            return _DASH
        return _shown_interval(statistics.interval(scores))


def _measured(of_seeds: Sequence[Record]) -> str:
    dates = sorted({record.date for record in of_seeds})
    commits = dict.fromkeys(f"`{record.commit[:7]}`" for record in of_seeds)
    cpus = dict.fromkeys(_cpu(record.machine) for record in of_seeds)
    return ", ".join((_range(dates), *commits, *cpus))


def _cpu(machine: str) -> str:
    """Returns "Intel Xeon" of "2 cores of Intel(R) Xeon(R) Processor, Python 3.11.7"."""
    cpu = machine.partition(",")[0].rpartition(" of ")[2]
    return cpu.replace("(R)", "").removesuffix(" Processor")


def _shown_interval(found: statistics.Interval) -> str:
    mean = _number(found.mean)
    if found.seeds == 1:
        return mean  # nothing of one seed stands out
    return f"**{mean}** ({_number(found.low)} to {_number(found.high)})"


def _aggregates(of_seeds: Sequence[float]) -> tuple[str, str, str, str]:
    """Returns the mean, median, interquartile mean and range of seeds; one seed has a mean only."""
    mean = _shown_interval(statistics.interval(of_seeds))
    if len(of_seeds) == 1:
        return mean, _DASH, _DASH, _DASH
    quartiles = statistics.interquartile(of_seeds)
    return (
        mean,
        _number(median(of_seeds)),
        f"{_number(quartiles.mean)} ({_number(quartiles.low)} to {_number(quartiles.high)})",
        _range([_number(x) for x in (min(of_seeds), max(of_seeds))]),
    )


def _shown_mean(of_seeds: Sequence[float]) -> str:
    return _shown_interval(statistics.interval(of_seeds)) if of_seeds else _DASH


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---'] * len(head))}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _kind(experiment: Experiment, record: Record) -> str:
    if experiment.score != "return":
        return experiment.score
    return "greedy return" if record.final[0].greedy else "return"


def _without_seed(record: Record) -> str:
    return re.sub(r" --seed \d+$", "", record.command)


def _number(value: float, digits: int | None = None) -> str:
    if digits is None:
        digits = 1 if abs(value) >= 100 else 2
    return f"{value:.{digits}f}".replace("-", "−")


def _millions(frames: float) -> str:
    return f"{frames / 1e6:.3g}M" if frames >= 999_500 else f"{frames / 1e3:.3g}k"


def _durations(of_seeds: Sequence[Record]) -> str:
    seconds = sorted(record.seconds for record in of_seeds)
    unit, name = (60.0, "min") if seconds[-1] >= 120 else (1.0, "s")
    beside = any(record.other_cores > _OTHER_CORES for record in of_seeds)
    times = _range([f"{x / unit:.0f}" for x in seconds])
    return f"{times} {name}{', beside other work' if beside else ''}"


def _range(found: Sequence[Any]) -> str:
    """Returns the first and last of sorted values; all of them where seeds have gaps."""
    distinct = list(dict.fromkeys(map(str, found)))
    gaps = all(isinstance(x, int) for x in found) and found[-1] - found[0] != len(found) - 1
    if gaps:
        return ", ".join(distinct)
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} to {distinct[-1]}"
