"""`benchmarks.trajectories` chooses a setting on the validation set and does no evaluation twice."""


import pytest

from benchmarks.trajectories import Options, Point, Setting, Study, choose, choose_stopped, main, means, stopped
from train_jax.tasks.puzzles.trajectories import STOPS, milestones


def result(trajectories, depth, accuracy):
    counts, depths = milestones(trajectories), milestones(depth)
    shares = [[accuracy(count, steps) for steps in depths] for count in counts]
    names = ("halting/best", "halting/last", "pass/best")
    return {"trajectories": counts, "depths": depths, "shares": dict.fromkeys(names, shares), "count": 1000.0}


def test_the_best_setting_of_each_number_and_the_cheapest_that_reaches_the_target():
    results = {
        0.1: [result(2, 4, lambda count, steps: 0.5 + 0.1 * count)],
        0.2: [result(2, 4, lambda count, steps: 0.9 + 0.02 * (steps >= 3)), result(2, 4, lambda *_: 0.2)],
    }
    validated = means(results, "halting/best")
    assert validated[Setting(1, 0.2, 3)] == pytest.approx(0.56) and len(validated) == 2 * 2 * 4
    assert choose(validated, 0.99) == [Setting(1, 0.1, 1), Setting(2, 0.1, 1)], "of equal ones the cheapest"
    assert choose({Setting(1, 0.1, 1): 0.4, Setting(1, 0.2, 2): 0.5, Setting(1, 0.3, 4): 0.6}, 0.45) == [
        Setting(1, 0.3, 4), Setting(1, 0.2, 2)
    ]  # fmt: skip


def test_an_interrupted_study_continues_and_each_noise_is_evaluated_once(tmp_path, monkeypatch, capsys):
    evaluated = []

    def evaluate(self, path, setting, data_dir, limit):
        evaluated.append((path, setting, data_dir, limit))
        if len(evaluated) == 2:
            raise KeyboardInterrupt
        return result(setting.trajectories, setting.depth, lambda count, steps: 0.9 + setting.noise / 10), 1.0

    monkeypatch.setattr(Study, "_computed", evaluate)
    monkeypatch.setattr(Study, "halt_limit", 5)
    options = Options(
        ("a", "b"), "v", "t", trajectories=(1, 2), depth=(4,), noises=(0.1, 0.2), test_puzzles=50, results=tmp_path
    )
    with pytest.raises(KeyboardInterrupt):
        main(options)
    main(options)
    first = [("a", Setting(2, 0.1, 4), "v", 1000), ("b", Setting(2, 0.1, 4), "v", 1000)]
    assert evaluated[:3] == [*first, first[1]]
    assert sorted(setting.noise for _, setting, data, _ in evaluated[3:] if data == "t") == [0, 0, 0.2, 0.2]
    assert len(evaluated) == 9 and "92.00%" in capsys.readouterr().out
    assert (tmp_path / "table.json").is_file()


def test_with_early_halting_the_cheapest_has_the_fewest_mean_steps():
    def of_run(offset):
        accuracy = [[[0.9 + 0.01 * i + offset] for i in range(2)] for _ in STOPS]
        steps = [[[2.0 + k + i] for i in range(2)] for k in range(len(STOPS))]
        return {"trajectories": [1, 2], "depths": [4], "stops": {"steps": steps, "exact": accuracy}}

    points = stopped({0.2: [of_run(0.0), of_run(0.02)]})
    assert len(points) == 2 * len(STOPS)
    assert points[Setting(2, 0.2, 4, STOPS[1])] == pytest.approx(Point(4.0, 0.92))
    best = Setting(2, 0.2, 4, STOPS[0])
    assert choose_stopped(points, 0.99) == choose_stopped(points, 0.915) == [best]
    assert choose_stopped(points, 0.9) == [Setting(1, 0.2, 4, STOPS[0]), best]


def test_thresholds_are_evaluated_with_early_halting_and_nothing_else_is(tmp_path, monkeypatch, capsys):
    evaluated = []

    def evaluate(self, path, setting, data_dir, limit):
        evaluated.append((setting, data_dir))
        if setting.threshold is None:
            return result(setting.trajectories, setting.depth, lambda *_: 0.9), 1.0
        accuracy = 0.9 + 0.05 * setting.threshold + 0.01 * setting.trajectories
        return {"exact_accuracy": accuracy, "steps": setting.trajectories + setting.threshold, "count": 50.0}, 1.0

    monkeypatch.setattr(Study, "_computed", evaluate)
    monkeypatch.setattr(Study, "halt_limit", 5)
    grid = {"trajectories": (2, 4), "depth": (4,), "noises": (0.1,), "thresholds": (0.5, 0.9)}
    main(Options(("a", "b"), "v", "t", **grid, target=0.96, results=tmp_path))
    settings = [Setting(count, 0.1, 4, threshold) for count in (2, 4) for threshold in (0.5, 0.9)]
    assert [each for each, data in evaluated if data == "v"] == [each for each in settings for _ in "ab"]
    on_test = [each for each, data in evaluated if data == "t"]
    assert on_test == [each for each in (Setting(1, 0.0, 5), settings[1], settings[3]) for _ in "ab"]
    assert "2 x 4, noise 0.1, halting above 0.9: 0.9650" in capsys.readouterr().out
    lines = (tmp_path / "evaluations.csv").read_text().splitlines()
    points = 2 * len(milestones(5))
    assert len(lines) == 1 + points + len(settings) * 2 + 2 * 2
    assert any(line.startswith("v,a,2,0.1,4,0.9,2.9,0.96") and line.endswith(",50") for line in lines)
