"""`benchmarks.trajectories` chooses a setting on the validation set and does no evaluation twice."""

import pytest

from benchmarks.trajectories import Options, Setting, Study, choose, main, means
from train_jax.tasks.puzzles.trajectories import milestones


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
