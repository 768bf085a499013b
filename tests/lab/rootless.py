"""What an unprivileged user does with a lab; prints `fine`."""

from __future__ import annotations

from farspan_lab import state
from tests.lab.conftest import OWN, Peer, parsed, play, two


def main() -> None:
    name = f"{OWN}-nobody"
    lab = state.up(parsed(two("nobody")))
    try:
        assert {
            (device.speed, device.memory) for site in lab.lab.sites for device in site.devices
        } == {(None, None)}
        assert "not in force" in lab.lab.notes[-1]
        echo = Peer(lab, "star", "echo")
        # Nothing here goes before other processes, so the delay may be longer.
        assert 0.02 <= min(play(lab, "utah", "ping", "star", 10)) < 0.1
        assert echo.result() == 10
        state.change(name, ("utah", "star"), {"up": False}, one_way=False)
        assert play(lab, "utah", "ping", "star", 2, 0.5) == [None, None]
        left = Peer(lab, "star", "echo").process
    finally:
        state.down(name)
    assert left.wait(timeout=60) == -9
    assert state.names() == []
    print("fine")


if __name__ == "__main__":
    main()
