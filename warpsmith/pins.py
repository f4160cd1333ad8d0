"""Which Hub repository and major version each kernel name stands for.

In a source checkout the kernels' build.toml files say so. A wheel has none, so it carries
pins.toml, which `python -m warpsmith pins` writes from them; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
PINS_FILE = PACKAGE_DIR / "pins.toml"


@dataclass(frozen=True)
class Pin:
    name: str
    repo_id: str
    version: int


def checkout_root() -> Path | None:
    """The source checkout this package is imported from, or None for an installed copy."""
    root = PACKAGE_DIR.parent
    return root if any(root.glob("kernels/*/build.toml")) else None


def read_toml(path: Path) -> dict:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10; the kernels package depends on tomli there
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def checkout_pins(root: Path) -> dict[str, Pin]:
    pins = {}
    for path in sorted(root.glob("kernels/*/build.toml")):
        general = read_toml(path).get("general", {})
        name = path.parent.name
        try:
            pins[name] = Pin(name, general["hub"]["repo-id"], general["version"])
        except KeyError as key:
            raise ValueError(f"{path}: {key} is missing under [general]") from None
    return pins


def packaged_pins(path: Path | None = None) -> dict[str, Pin]:
    entries = read_toml(path or PINS_FILE)
    return {name: Pin(name, entry["repo-id"], entry["version"]) for name, entry in entries.items()}


def known_kernels() -> dict[str, Pin]:
    root = checkout_root()
    return packaged_pins() if root is None else checkout_pins(root)


def render_pins(pins: dict[str, Pin]) -> str:
    lines = ["# Written by `python -m warpsmith pins` from kernels/*/build.toml."]
    for pin in pins.values():
        lines += ["", f"[{pin.name}]", f'repo-id = "{pin.repo_id}"', f"version = {pin.version}"]
    return "\n".join(lines) + "\n"


def write() -> int:
    root = checkout_root()
    if root is None:
        print("pins.toml can only be written in a source checkout")
        return 1
    PINS_FILE.write_text(render_pins(checkout_pins(root)), encoding="utf-8")
    print(f"wrote {PINS_FILE}")
    return 0
