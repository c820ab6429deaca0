"""report.html of runs: complete, escaped, loading nothing, whatever is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser as chromium
import numpy as np
import pytest
from page_reader import Reader
from PIL import Image

from zoo.engine import NonFiniteError
from zoo.pages import reported, write_run_report
from zoo.pages.run_report import attempted

EVIL = '<script>alert(1)</script> & "x"'


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = content if isinstance(content, list) else [content]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def picture(folder: Path, name: str, size: tuple[int, int] = (8, 8)) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).save(folder / name)


def config(**options: Any) -> dict[str, Any]:
    return {
        "recipe": "train_vit", "processes": 1, "command": ["recipes/train_vit.py", "--lr", "0.5"],
        "options": {"model": EVIL, "data": "digits", "lr": 0.5, "epochs": 3, **options},
        "versions": {"torch": "2.14"}, "commit": "abc", "hardware": {"cpu": "Z80"},
    }  # fmt: skip


def summary(status: str = "completed") -> dict[str, Any]:
    return {
        "model": EVIL, "data": "digits", "status": status, "epochs": 3, "steps": 60,
        "params": 1234, "trainable_params": 1000, "wall_seconds": 90.0, "samples_per_second": 10.0,
        "metrics": {"val/top1": 75.0, "val/n": 360, "val/loss": 1.5}, "seed": 4,
        "best": {"val/top1": 80.0, "epoch": 2},
    }  # fmt: skip


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"step": s, "epoch": s / 20, "train/loss": 3 - s / 30, "attn/blocks.0.attn/entropy": 0.9}
        for s in range(10, 61, 10)
    ]
    found += [
        {"step": 20 * e, "epoch": e, "val/top1": top, "val/loss": 1.5, "val/n": 360}
        for e, top in ((1, 60.0), (2, 80.0), (3, 75.0))
    ]
    return sorted(found, key=lambda row: row["step"])


def alarm(**changes: Any) -> dict[str, Any]:
    own = {"kind": "collapse", "step": 40, "layer": "blocks.0.attn", "head": 0, "value": 0.97}
    told = {"message": f"all look at {EVIL}", "causes": [EVIL], "remedies": ["--lr 1e-4"]}
    return {**own, **told, "limit": None, **changes}


def full_run(folder: Path) -> Path:
    write(folder, "config.json", config(save_attention_every=10))
    write(folder, "summary.json", summary())
    write(folder, "metrics.jsonl", rows())
    write(folder, "alarms.jsonl", [alarm()])
    for name in ("over_time", "step000010", "step000020", "step000060", "gates"):
        picture(folder, f"attention/{name}.png")
    picture(folder, "samples/wrong00.png")
    sample = {"image": "wrong00.png", "truth": EVIL, "found": [[EVIL, 0.75], ["cat", 0.25]]}
    told = {"kind": "classes", "images": 360, "mistakes": 90, "wrong": [sample], "right": [sample]}
    write(folder, "samples/predictions.json", told)
    (folder / "samples" / "classes.csv").write_text(
        "name,n,precision,recall,f1,confused_with,confused\n"
        "cat,30,90.0,80.0,84.7,dog,5\ndog,9,,0.0,0.0,cat,9\n"
    )
    return folder


def page(folder: Path) -> tuple[str, Reader]:
    text = write_run_report(folder).read_text(encoding="utf-8")
    return text, Reader(text)


def headings(reader: Reader) -> list[str]:
    return reader.text["h2"]


def test_all_parts_are_there(tmp_path: Path) -> None:
    text, reader = page(full_run(tmp_path / "run"))
    assert headings(reader) == [
        "Curves", "Final metrics", "Classes", "Sample predictions", "Attention", "Alarms",
        "Configuration", "Versions and hardware", "Commands",
    ]  # fmt: skip
    for shown in ("80 %", "75", "1.23 k", "1 k learn", "1 min 30 s", "75.0 %", "dog (5)", "84.7"):
        assert shown in text, shown
    assert "epoch 2 (best)" in text
    for what in ("Attention over time", "first look, step 10", "last look, step 60", "Gates"):
        assert what in text
    assert "step 20<" not in text
    assert "collapse at step 40" in text
    assert "blocks.0.attn, head 0" in text
    assert any("--resume auto" in line for line in reader.text["pre"])


def test_nothing_is_run_or_loaded(tmp_path: Path) -> None:
    text, reader = page(full_run(tmp_path / "run"))
    assert "<script>alert" not in text
    assert text.count(EVIL.replace("<", "&lt;").replace(">", "&gt;")[:20]) > 5
    for tag, name, value in reader.attributes:
        assert tag not in ("link", "iframe", "object")
        assert name not in ("srcset", "action")
        assert not name.startswith("on")
        if name == "src":
            assert value.startswith("data:image/png;base64,")
        if name == "href":
            assert value.startswith("#")
    assert not re.search(r"url\(|@import", text)


def test_the_interval_is_wilsons(tmp_path: Path) -> None:
    text, _ = page(full_run(tmp_path / "run"))
    p, n, z = 0.75, 360, 1.959964
    middle = (p + z * z / 2 / n) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / 4 / n / n) ** 0.5
    assert re.search(rf"{100 * (middle - half):.4g} to\s+{100 * (middle + half):.4g}", text)


@pytest.mark.parametrize(
    ("options", "looks", "alarms", "said"),
    [
        ({}, 0, [], "Not watched:"),
        ({"save_attention_every": 50}, 0, [], "no look was due yet"),
        ({"save_attention_every": 50}, 2, [], "watched every 50 updates, and nothing looked wrong"),
        ({"save_attention_every": 50}, 2, [alarm(head=None, layer="", value=None)], "Alarms (1)"),
        ({}, 0, [{"step": 3}], "Alarms (1)"),
    ],
)
def test_what_is_said_of_alarms(
    tmp_path: Path, options: dict, looks: int, alarms: list, said: str
) -> None:
    write(tmp_path, "config.json", config(**options))
    rows = [{"step": 50 * i, "epoch": i, "attn/a/entropy": 0.5} for i in range(1, looks + 1)]
    write(tmp_path, "metrics.jsonl", rows)
    write(tmp_path, "alarms.jsonl", alarms)
    text, _ = page(tmp_path)
    assert said in text
    assert ("nothing looked wrong" in text) == ("nothing looked wrong" in said)


@pytest.mark.parametrize("status", ["completed", "interrupted", "failed", "stopped by alarm"])
def test_the_status_is_told(tmp_path: Path, status: str) -> None:
    write(tmp_path, "config.json", config())
    write(tmp_path, "summary.json", summary(status))
    style = {"completed": "better", "failed": "worse"}.get(status, "open")
    assert f'<span class="badge {style}">{status}</span>' in page(tmp_path)[0]


def test_a_folder_with_almost_nothing_has_a_page(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {})
    text, reader = page(tmp_path)
    assert "not finished" in text
    assert headings(reader) == ["Alarms", "Configuration", "Versions and hardware"]
    (tmp_path / "config.json").unlink()
    write(tmp_path, "metrics.jsonl", [*rows(), {"step": None, "epoch": 1}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "val/t')
    assert "Final metrics" in headings(page(tmp_path)[1])


def test_missing_pictures_leave_the_words(tmp_path: Path) -> None:
    full_run(tmp_path)
    (tmp_path / "samples" / "wrong00.png").unlink()
    (tmp_path / "attention" / "over_time.png").write_bytes(b"")
    text, _ = page(tmp_path)
    assert "75.0 %" in text
    assert "Attention over time<" not in text


def test_pictures_outside_the_samples_are_not_read(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    picture(tmp_path, "secret.png", (9, 9))
    told = {"kind": "written", "images": 1}
    row = {"image": "../../secret.png", "written": "a", "truth": ["b"], "exact": False}
    write(run, "samples/predictions.json", {**told, "samples": [row]})
    assert 'width="9"' not in page(run)[0]


def test_retrievals_and_written_captions(tmp_path: Path) -> None:
    full_run(tmp_path)
    found = [{"image": "wrong00.png", "score": 0.5, "right": True}]
    texts = [{"text": EVIL, "score": 0.25, "right": False}]
    told = {
        "kind": "retrieval", "images": 2, "captions": 3, "score": "cosine similarity",
        "of_images": [{"image": "wrong00.png", "truth": ["a"], "rank": 2, "found": texts}],
        "of_captions": [{"text": EVIL, "rank": 1, "found": found}],
    }  # fmt: skip
    write(tmp_path, "samples/predictions.json", told)
    text, reader = page(tmp_path)
    assert "Sample retrievals" in headings(reader)
    assert "place 2" in text
    assert "0.25" in text
    row = {"image": "wrong00.png", "written": EVIL, "truth": [EVIL], "exact": True}
    write(tmp_path, "samples/predictions.json", {"kind": "written", "images": 2, "samples": [row]})
    assert "Captions written" in headings(page(tmp_path)[1])


def test_a_page_stays_small(tmp_path: Path) -> None:
    write(tmp_path, "config.json", config(save_attention_every=1))
    layers = [f"blocks.{i}.attn" for i in range(24)]
    names = ("entropy", "max_weight", "distance")
    write(tmp_path, "metrics.jsonl", [
        {"step": s, "epoch": s, **{f"attn/{x}/{n}": s * 0.37 % 1 for x in layers for n in names}}
        for s in range(1000)
    ])  # fmt: skip
    for name in ("over_time", "step000001", "step000900", "gates"):
        picture(tmp_path, f"attention/{name}.png", (1200, 900))
    path = write_run_report(tmp_path)
    assert path.stat().st_size < 5_000_000
    assert "blocks.0.attn" in path.read_text()
    assert "blocks.23.attn" in path.read_text()


def test_no_run_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} is no run folder"):
        write_run_report(tmp_path)


def fake_run(folder: Path, main: bool = True, report: bool = True) -> Any:
    return SimpleNamespace(
        folder=folder,
        accelerator=SimpleNamespace(is_main_process=main, print=print),
        options=SimpleNamespace(report=report),
    )


@pytest.mark.parametrize("error", [None, SystemExit(130), NonFiniteError("loss is nan")])
def test_every_end_of_a_training_is_reported(tmp_path: Path, error: BaseException | None) -> None:
    write(tmp_path, "config.json", config())

    def train(run: Any) -> None:
        with reported(run):
            if error is not None:
                raise error

    if error is None:
        train(fake_run(tmp_path))
    else:
        with pytest.raises(type(error)):
            train(fake_run(tmp_path))
    assert (tmp_path / "report.html").exists()


def test_other_processes_and_mistakes_before_training_write_nothing(tmp_path: Path) -> None:
    write(tmp_path, "config.json", config())
    with reported(fake_run(tmp_path, main=False)):
        pass
    with reported(fake_run(tmp_path, report=False)):
        pass
    with pytest.raises(ValueError, match="batch"), reported(fake_run(tmp_path)):
        raise ValueError("batch")
    assert not (tmp_path / "report.html").exists()


def test_a_failing_report_is_a_warning(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    with reported(fake_run(tmp_path / "nothing")):
        pass
    assert "warning: the report could not be written: FileNotFound" in capsys.readouterr().err
    write(tmp_path, "config.json", config())
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with reported(fake_run(tmp_path)):
        pass
    assert "pip install 'attention-zoo[plots]'" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), attempted("samples"):
        raise KeyboardInterrupt


@pytest.mark.skipif(chromium.CHROMIUM is None, reason="needs chromium")
def test_in_a_browser(tmp_path: Path) -> None:
    full_run(tmp_path)
    path = write_run_report(tmp_path)
    with chromium.browser() as tab:
        tab.show(360, 800, dark=True)
        tab.call("Page.navigate", url=path.resolve().as_uri())
        tab.wait("document.documentElement.dataset.ready")
        assert tab.evaluate("document.documentElement.scrollWidth <= 360")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"
        tab.show(1000, 800)
        assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(28, 28, 30)"
        chart = "document.querySelector('.chart')"
        tab.evaluate(f"{chart}.focus()")
        tab.key("ArrowRight")
        tab.key("ArrowRight")
        shown = tab.evaluate(f"{chart}.querySelector('output').textContent")
        assert shown == "step 20: train 2.333, val 1.5"
        sort = "[...document.querySelectorAll('th button')].find(b => b.textContent == 'recall %')"
        tab.evaluate(f"{sort}.click()")
        first = "document.querySelector('.tall tbody tr').cells[0].textContent"
        assert tab.evaluate(first) == "dog"
        tab.evaluate(f"{sort}.click()")
        assert tab.evaluate(first) == "cat"
        assert tab.errors == []
        assert all(address.startswith(("file:", "data:", "about:")) for address in tab.requests)
