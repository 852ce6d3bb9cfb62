from jobs.benchmarks.learning_figure import draw

POINTS = {"dense": (100.0, 1.5), "small": (1.0, 1.6), "beaten": (2.0, 1.65), "smallest": (0.5, 1.7)}


def test_the_line_goes_along_the_front_and_every_entry_is_named(tmp_path):
    figure = draw(POINTS, tmp_path / "front.png")
    (axes,) = figure.axes
    (line,) = axes.lines
    assert list(zip(*line.get_data(), strict=True)) == [POINTS[name] for name in ("smallest", "small", "dense")]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [
        "smallest: 1.7000, 0.5 MB",
        "small: 1.6000, 1 MB",
        "beaten: 1.6500, 2 MB",
        "dense: 1.5000, 100 MB",
    ]
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_no_number_does_not_stop_it(tmp_path):
    draw({"diverged": (1.0, float("nan"))}, tmp_path / "front.png")
    assert (tmp_path / "front.png").exists()
