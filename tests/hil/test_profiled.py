"""What is made of profiled launches: iterations told apart, medians, and what happens where the profiler lost some."""

import pytest

from hil import optimizers
from hil.compiled import by_iteration
from hil.files import write_atomic
from hil.fused import EAGER_ITERATIONS, _without_flush


def profile(iterations: int, *durations: float) -> list[tuple[str, float]]:
    """A flush and kernels, each iteration a microsecond longer than the one before."""
    return [
        launch
        for number in range(iterations)
        for launch in (("fill", 100.0), *((f"kernel{place}", us + number) for place, us in enumerate(durations)))
    ]


def test_launches_of_iterations():
    assert by_iteration(profile(3, 5.0), 3) == [[("fill", 100.0), ("kernel0", 5.0 + number)] for number in range(3)]


@pytest.mark.parametrize("lost", [[], profile(4, 5.0)[1:], profile(4, 5.0, 7.0)[:-4], profile(1, 5.0)])
def test_launches_that_were_not_seen_are_told(lost):
    with pytest.raises(RuntimeError, match="not 4 times the same"):
        by_iteration(lost, 4)


def test_launches_of_an_optimizers_step_are_medians_without_the_flush():
    assert optimizers.medians(profile(optimizers.ITERATIONS, 5.0, 50.0)) == [8.0, 53.0]
    with pytest.raises(RuntimeError):
        optimizers.medians(profile(optimizers.ITERATIONS, 5.0, 50.0)[:-1])


def test_an_operation_is_its_median_iteration_without_the_flush():
    time_us, launches, names = _without_flush(profile(EAGER_ITERATIONS, 5.0, 50.0))
    assert (time_us, launches, names) == (61.0, 2, {"kernel0": 8.0, "kernel1": 53.0})


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "rows.json"
    write_atomic(path, lambda beside: beside.write_text("old"))

    def half(beside):
        beside.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, half)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("rows.json", "old")]


@pytest.mark.parametrize("command", ["fused", "optimizers"])
def test_without_a_gpu_one_line_says_so(command, monkeypatch, tmp_path, capsys):
    from hil import fused

    main = {"fused": fused.main, "optimizers": optimizers.main}[command]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", [command, *(["eager"] if command == "fused" else []), "--out", str(tmp_path / "o")])
    assert main() == 3
    assert capsys.readouterr().err == "no CUDA GPU here: run this on a Hopper machine\n"
    assert not (tmp_path / "o").exists()
